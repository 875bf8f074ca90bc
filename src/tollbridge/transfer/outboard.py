"""The TCP medium in a process of its own: `OutboardSender` and `OutboardReceiver`, for KV memory that can be shared.

Why. An I/O thread needs the interpreter lock a few hundred times per frame and shares it with the engine: the engine
waits for it at the end of every product, and longest when the I/O thread is put aside by the scheduler while it holds
it. The I/O process maps the cache (shared.py), runs TcpSender or TcpReceiver on it, and leaves the engine the lock, the
core, and a message per call. What an engine pays is one `sendall` of some hundred bytes per layer and chunk.

What each process knows. The ledger (who is active, who has ended) is here, so that the engine's questions need no
answer from elsewhere; books, sockets and deadlines are there. Orders are obeyed in their order. Two wait for an answer:
`rewind`, because on return nobody may read the blocks, and the gauges.

Ends. The I/O process ends when the pipe does, so it outlives no engine. When it dies first, and not before the kernel
says that it is gone and so writes no more, every active transfer ends as failed(io_lost), and the medium takes no new
ones: the same as when an I/O thread fails.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import tollbridge
from tollbridge.errors import ConfigError, StartupError
from tollbridge.transfer.base import (
    Fingerprint,
    KVMemory,
    KVReceiver,
    KVSender,
    LoadRequest,
    Reason,
    TransferEnd,
    TransferStatistics,
)
from tollbridge.transfer.compose import require_load, require_table
from tollbridge.transfer.frames import transfer_key
from tollbridge.transfer.ledger import Ledger
from tollbridge.transfer.memory import HostMemory
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.orders import (
    Abandon,
    Answer,
    Ended,
    Inspect,
    Load,
    Order,
    Pipe,
    Publish,
    Ready,
    Refused,
    Register,
    Rewind,
    Shed,
    Start,
    reports,
)
from tollbridge.transfer.shared import Layout
from tollbridge.transfer.tally import Tally, Verdict
from tollbridge.transfer.tcp import TcpReceiver, TcpSender

logger = logging.getLogger(__name__)

_START_S = 60.0
_CLOSE_S = 10.0
_LOST = Answer()  # what a process that is gone says: nothing is connected, and nobody reads anything


def make_sender(memory: KVMemory, fingerprint: Fingerprint, options: TransferOptions) -> KVSender:
    """Return the prefill side, in a process of its own where that can be."""
    if _is_outboard(memory, options):
        assert isinstance(memory, HostMemory)
        return OutboardSender(memory, fingerprint, options)
    return TcpSender(memory, fingerprint, options)


def make_receiver(memory: KVMemory, fingerprint: Fingerprint, options: TransferOptions) -> KVReceiver:
    """Return the decode side, in a process of its own where that can be."""
    if _is_outboard(memory, options):
        assert isinstance(memory, HostMemory)
        return OutboardReceiver(memory, fingerprint, options)
    return TcpReceiver(memory, fingerprint, options)


class Outboard:
    """One I/O process, and the conversation with it: what both sides share.

    Raises what the medium raises over there (ConfigError, StartupError).
    """

    def __init__(
        self, side: Literal["send", "receive"], memory: HostMemory, fingerprint: Fingerprint, options: TransferOptions
    ) -> None:
        assert memory.shared_fd is not None
        self.ledger = Ledger(options.media)
        self._side: Literal["send", "receive"] = side
        self._asking = threading.Lock()
        self._answers = queue.SimpleQueue[Answer]()
        ours, theirs = socket.socketpair()
        self._pipe = Pipe(ours)
        with theirs:
            self._process = _spawn(theirs.fileno(), memory.shared_fd)
        self.pid = self._process.pid
        level = logging.getLogger("tollbridge").getEffectiveLevel()
        self.tell(Start(side, options, fingerprint, Layout.of(memory), level))
        self.address = self._await_ready(ours)
        self._thread = threading.Thread(target=self._listen, name=f"kv-{side}-outboard", daemon=True)
        self._thread.start()

    def tell(self, order: Order) -> None:
        """Give an order; lost when the process is gone."""
        try:
            self._pipe.send(order)
        except OSError:
            return

    def ask(self, order: Rewind | Inspect) -> Answer:
        """Give an order and wait until it was obeyed, or the process is gone."""
        with self._asking:
            self.tell(order)
            answer = self._answers.get()
            if answer is _LOST:
                self._answers.put(_LOST)  # for whoever asks next
            return answer

    def inspect(self, *, check: bool = False) -> Answer:
        return self.ask(Inspect(check))

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken, here or there."""
        self.ledger.check()
        broken = self.inspect(check=True).broken
        assert not broken, broken

    def close(self) -> None:
        """Let it end everything as cancelled(shutdown); return when it is gone. Idempotent."""
        self.ledger.close()
        if not self._thread.is_alive():
            return
        self._pipe.shut()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self._process.kill()
            self._thread.join()

    # ── inside ──

    def _await_ready(self, ours: socket.socket) -> tuple[str, int]:
        ours.settimeout(_START_S)
        try:
            data = self._pipe.receive()
        except TimeoutError:
            data = None
        ours.settimeout(None)
        report = reports.decode(data) if data is not None else None
        if isinstance(report, Ready):
            return report.address
        self._pipe.close()
        self._process.kill()
        self._process.wait()
        if isinstance(report, Refused):
            raise (ConfigError if report.kind == ConfigError.__name__ else StartupError)(report.message)
        raise StartupError(f"The KV I/O process did not start (exit status {self._process.returncode}).")

    def _listen(self) -> None:
        """Take what the process says until it is gone."""
        while (data := self._pipe.receive()) is not None:
            report = reports.decode(data)
            if isinstance(report, Ended):
                for end in report.ends:
                    self.ledger.end(end)
            elif isinstance(report, Answer):
                self._answers.put(report)
        status = self._process.wait()  # from here on nothing touches the blocks
        self.ledger.close()
        self._give_up(f"The KV I/O process of this worker ended (exit status {status}).")
        self._answers.put(_LOST)
        self._pipe.close()

    def _give_up(self, detail: str) -> None:
        left = self.ledger.active()
        if left:
            logger.error("%s", detail)
        for transfer_id in left:
            verdict = Verdict("failed", Reason.IO_LOST, detail)
            self.ledger.end(Tally().report(transfer_id, self._side, verdict, num_tokens=0, now_s=0.0))


class OutboardSender:
    """A KVSender; see the top of the file."""

    def __init__(self, memory: HostMemory, fingerprint: Fingerprint, options: TransferOptions | None = None) -> None:
        self._memory = memory
        self.outboard = Outboard("send", memory, fingerprint, options or TransferOptions())
        self._ledger = self.outboard.ledger
        self.address = self.outboard.address
        self.poll: Callable[[], list[TransferEnd]] = self._ledger.poll
        self.set_listener = self._ledger.set_listener
        self.check = self.outboard.check
        self.close = self.outboard.close

    def register(self, transfer_id: str, *, digest: bytes, num_tokens: int) -> None:
        """Announce a transfer; TransferError when its id is malformed or active here."""
        transfer_key(transfer_id)
        self._ledger.begin(transfer_id)
        self.outboard.tell(Register(transfer_id, digest, num_tokens))

    def publish(
        self, transfer_id: str, block_table: Sequence[int], num_tokens: int, *, layer: int | None = None
    ) -> None:
        """Say what is in memory; ValueError when `block_table` does not cover it or `layer` does not exist."""
        table = tuple(block_table)
        require_table(self._memory, table, num_tokens, layer)
        self.outboard.tell(Publish(transfer_id, table, num_tokens, layer))

    def rewind(self, transfer_id: str) -> None:
        """Forget what was published; on return no thread reads the blocks."""
        self.outboard.ask(Rewind(transfer_id))

    def cancel(self, transfer_id: str, detail: str) -> None:
        """End the transfer as cancelled unless it has ended."""
        self.outboard.tell(Abandon(transfer_id, detail))

    def shed(self, transfer_ids: Sequence[str], max_blocks: int, *, unsent_too: bool) -> None:
        """Fail finished sends until the others hold at most `max_blocks`."""
        self.outboard.tell(Shed(tuple(transfer_ids), max_blocks, unsent_too))

    def statistics(self) -> TransferStatistics:
        gauges = self.outboard.inspect()
        statistics = self._ledger.statistics(gauges.num_connections, gauges.num_connections_by_medium)
        goodput = gauges.goodput_bytes_per_s or statistics.goodput_bytes_per_s
        return replace(statistics, goodput_bytes_per_s=goodput, pending_bytes=gauges.pending_bytes)


class OutboardReceiver:
    """A KVReceiver; see the top of the file."""

    def __init__(self, memory: HostMemory, fingerprint: Fingerprint, options: TransferOptions | None = None) -> None:
        self._memory = memory
        self.outboard = Outboard("receive", memory, fingerprint, options or TransferOptions())
        self._ledger = self.outboard.ledger
        self.poll: Callable[[], list[TransferEnd]] = self._ledger.poll
        self.set_listener = self._ledger.set_listener
        self.check = self.outboard.check
        self.close = self.outboard.close

    def open(self, load: LoadRequest) -> None:
        """Ask for `load`; TransferError when its id is malformed or active here, ValueError when it does not fit."""
        transfer_key(load.transfer_id)
        load = replace(load, block_table=tuple(load.block_table))
        require_load(self._memory, load)
        self._ledger.begin(load.transfer_id)
        self.outboard.tell(Load(load))

    def cancel(self, transfer_id: str, detail: str) -> None:
        """Stop the wire and end as cancelled unless ended."""
        self.outboard.tell(Abandon(transfer_id, detail))

    def statistics(self) -> TransferStatistics:
        gauges = self.outboard.inspect()
        statistics = self._ledger.statistics(gauges.num_connections, gauges.num_connections_by_medium)
        return replace(statistics, pending_bytes=gauges.pending_bytes)


def _is_outboard(memory: KVMemory, options: TransferOptions) -> bool:
    can = isinstance(memory, HostMemory) and memory.shared_fd is not None
    if options.io == "process" and not can:
        raise ConfigError(
            "transfer.io process needs KV memory that can be shared, which this engine's is not: use auto."
        )
    return can and options.io != "threads"


def _spawn(pipe_fd: int, memory_fd: int) -> subprocess.Popen[bytes]:
    # the child finds this very package, whatever made it importable here; stdout belongs to the worker's ready line
    package_path = str(Path(tollbridge.__file__).parents[1])
    path = os.pathsep.join(filter(None, [package_path, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "tollbridge.transfer.outboard_main", str(pipe_fd), str(memory_fd)],
        pass_fds=(pipe_fd, memory_fd),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )
