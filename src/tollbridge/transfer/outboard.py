"""The TCP medium in a process of its own: `OutboardSender` and `OutboardReceiver`, for KV memory that can be shared.

Why. An I/O thread needs the interpreter lock a few hundred times per frame and shares it with the engine: the engine
waits for it at the end of every product, and longest when the I/O thread is put aside by the scheduler while it holds
it. The I/O process maps the cache (shared.py), runs TcpSender or TcpReceiver on it, and leaves the engine the lock, the
core, and a message per call. What an engine pays is one `sendall` of some hundred bytes per layer and chunk.

What each process knows. The ledger (who is active, who has ended) is here, so that the engine's questions need no
answer from elsewhere; books, sockets and deadlines are there. Orders are obeyed in their order. Two wait for an answer:
`rewind`, because on return nobody may read the blocks, and the gauges.

Memory on a device is not mapped there: the I/O process has the ring, and asks for each copy (copies.py). What is
published is held back here until it has been computed (gate.py).

Ends. The I/O process ends when the pipe does, so it outlives no engine. When it dies first, and not before the kernel
says that it is gone and so writes no more, every active transfer ends as failed(io_lost), and the medium takes no new
ones: the same as when an I/O thread fails. One that is stopped, and so would stop the engine, is made to end like that.
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
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
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
    Published,
    Reason,
    TransferEnd,
    TransferStatistics,
)
from tollbridge.transfer.compose import require_layer, require_load, require_table
from tollbridge.transfer.frames import NO_TRANSFER, transfer_key
from tollbridge.transfer.gate import Gate
from tollbridge.transfer.ledger import Ledger
from tollbridge.transfer.lent import lend
from tollbridge.transfer.memory import HostMemory
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.orders import (
    NUM_WAITS,
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
from tollbridge.transfer.stage import PASSED, Fence
from tollbridge.transfer.staging import DeviceMemory
from tollbridge.transfer.tally import Tally, Verdict
from tollbridge.transfer.tcp import TcpReceiver, TcpSender

logger = logging.getLogger(__name__)

_START_S = 60.0
_CLOSE_S = 10.0
_LOST = Answer()  # what a process that is gone says: nothing is connected, and nobody reads anything


def make_sender(memory: KVMemory, fingerprint: Fingerprint, options: TransferOptions) -> KVSender:
    """Return the prefill side, in a process of its own where that can be."""
    if _is_outboard(memory, options):
        try:
            return OutboardSender(memory, fingerprint, options)
        except OSError as error:
            _stay_inside(error, options)
    return TcpSender(memory, fingerprint, options)


def make_receiver(memory: KVMemory, fingerprint: Fingerprint, options: TransferOptions) -> KVReceiver:
    """Return the decode side, in a process of its own where that can be."""
    if _is_outboard(memory, options):
        try:
            return OutboardReceiver(memory, fingerprint, options)
        except OSError as error:
            _stay_inside(error, options)
    return TcpReceiver(memory, fingerprint, options)


class Outboard:
    """One I/O process, and the conversation with it: what both sides share.

    Raises what the medium raises over there (ConfigError, StartupError); OSError without shared memory or a process.
    """

    def __init__(
        self, side: Literal["send", "receive"], memory: KVMemory, fingerprint: Fingerprint, options: TransferOptions
    ) -> None:
        self.ledger = Ledger(options.media, io="process")
        self._side: Literal["send", "receive"] = side
        self._answer_timeout_s = options.answer_timeout_s
        self._given_up = ""  # why it was ended, if it was
        self._asking = threading.Lock()
        self._answers = queue.SimpleQueue[Answer]()
        ours, theirs = socket.socketpair()
        with ExitStack() as undo:
            undo.push(ours)
            undo.push(theirs)
            self._shared = shared = lend(memory, options, name=f"kv-{side}-copies")
            undo.pop_all()
        self._pipe = Pipe(ours, send_timeout_s=options.answer_timeout_s)
        try:
            with theirs:
                self._process = _spawn(theirs.fileno(), *shared.fds)
        except OSError:
            shared.passed_on()  # to nobody: what waits for the other end sees that it is gone
            shared.close()
            self._pipe.close()
            raise
        shared.passed_on()
        self.pid = self._process.pid
        level = logging.getLogger("tollbridge").getEffectiveLevel()
        self.tell(Start(side, options, fingerprint, shared.layout, level))
        self.address = self._await_ready(ours)
        self._gone = threading.Event()
        self._thread = threading.Thread(target=self._listen, name=f"kv-{side}-outboard", daemon=True)
        self._watch_thread = threading.Thread(target=self._watch, name=f"kv-{side}-watch", daemon=True)
        self._thread.start()
        self._watch_thread.start()

    def hold(self, fence: Fence) -> None:
        """Let nothing that is asked for from now on touch the memory before `fence` is behind us."""
        self._shared.hold(fence)

    def tell(self, order: Order) -> None:
        """Give an order; lost when the process is gone. One that takes no orders is ended."""
        try:
            self._pipe.send(order)
        except TimeoutError:
            self._end_stopped("took no order")
        except OSError:
            return

    def ask(self, order: Rewind | Inspect) -> Answer:
        """Give an order and wait until it was obeyed, or the process is gone. One that gives no answer is ended."""
        with self._asking:
            self.tell(order)
            answer = self._maybe_answer()
            if answer is None:
                self._end_stopped("gave no answer")
                answer = self._last_answer()
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
        if self._thread.is_alive():
            self._pipe.shut()
            self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self._process.kill()
            self._thread.join()
        self._watch_thread.join()

    # ── inside ──

    def _watch(self) -> None:
        """Ask now and then while a transfer is active: a process that is stopped keeps none of its deadlines."""
        while not self._gone.wait(self._answer_timeout_s / 2):
            if self.ledger.active():
                self.inspect()

    def _maybe_answer(self) -> Answer | None:
        for _ in range(NUM_WAITS):
            with suppress(queue.Empty):
                return self._answers.get(timeout=self._answer_timeout_s / NUM_WAITS)
        return None

    def _last_answer(self) -> Answer:
        """Wait until the process is gone: until then it may still read the blocks."""
        while (answer := self._answers.get()) is not _LOST:
            pass
        return answer

    def _end_stopped(self, what: str) -> None:
        """End a process that hangs, or is stopped: its transfers fail, so that nobody waits for them."""
        if not self._given_up:
            self._given_up = f"The KV I/O process of this worker {what} for {self._answer_timeout_s:g} s and was ended."
            logger.error(
                "%s Prompts are computed where they are decoded from now on: restart the worker.", self._given_up
            )
        self._process.kill()

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
        self._shared.close()
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
        status = self._process.wait()
        self._shared.close()  # from here on nothing touches the blocks
        self.ledger.close()
        self._give_up(self._given_up or f"The KV I/O process of this worker ended (exit status {status}).")
        self._answers.put(_LOST)
        self._gone.set()
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

    def __init__(self, memory: KVMemory, fingerprint: Fingerprint, options: TransferOptions | None = None) -> None:
        self._memory = memory
        self.outboard = Outboard("send", memory, fingerprint, options or TransferOptions())
        self._ledger = self.outboard.ledger
        self.address = self.outboard.address
        self.set_listener = self._ledger.set_listener
        self.check = self.outboard.check
        self._told: dict[str, tuple[tuple[int, ...], int]] = {}  # table and tokens, as told last, of active transfers
        self._gate = Gate(lambda task: task(), name="kv-gate-outboard")

    def close(self) -> None:
        """End everything as cancelled(shutdown); return when the process is gone. Idempotent."""
        self._gate.close()
        self.outboard.close()

    def register(self, transfer_id: str, *, digest: bytes, num_tokens: int) -> None:
        """Announce a transfer; TransferError when its id is malformed or active here."""
        transfer_key(transfer_id)
        self._ledger.begin(transfer_id)
        self._told[transfer_id] = ((), 0)
        self.outboard.tell(Register(transfer_id, digest, num_tokens))

    def publish(
        self, transfer_id: str, block_table: Sequence[int], num_tokens: int, *, layer: int | None = None
    ) -> None:
        """Say what is in memory; ValueError when `block_table` does not cover it or `layer` does not exist."""
        self.publish_all([Published(transfer_id, block_table, num_tokens)], layer=layer)

    def publish_all(self, chunks: Sequence[Published], *, layer: int | None = None) -> None:
        """The same for the chunks of one forward pass: one fence, and tables are told when they have changed."""
        fence = self._memory.fence()
        for transfer_id, block_table, num_tokens in chunks:
            order = self._order(transfer_id, tuple(block_table), num_tokens, layer)
            self._gate.after(transfer_key(transfer_id), fence, partial(self.outboard.tell, order))

    def rewind(self, transfer_id: str) -> None:
        """Forget what was published; on return no thread reads the blocks."""
        self._gate.forget(transfer_key(transfer_id))
        if transfer_id in self._told:
            self._told[transfer_id] = ((), 0)  # what told of the table may not have passed the gate
        self.outboard.ask(Rewind(transfer_id))

    def cancel(self, transfer_id: str, detail: str) -> None:
        """End the transfer as cancelled unless it has ended."""
        self.outboard.tell(Abandon(transfer_id, detail))

    def poll(self) -> list[TransferEnd]:
        """Return the ends since the last call."""
        ends = self._ledger.poll()
        for end in ends:
            self._told.pop(end.transfer_id, None)
        return ends

    def shed(self, transfer_ids: Sequence[str], max_blocks: int, *, unsent_too: bool) -> None:
        """Fail finished sends until the others hold at most `max_blocks`."""
        task = partial(self.outboard.tell, Shed(tuple(transfer_ids), max_blocks, unsent_too))
        self._gate.after(NO_TRANSFER, PASSED, task)  # behind what was published before: that is what it counts

    def statistics(self) -> TransferStatistics:
        gauges = self.outboard.inspect()
        statistics = self._ledger.statistics(gauges.num_connections, gauges.num_connections_by_medium)
        goodput = gauges.goodput_bytes_per_s or statistics.goodput_bytes_per_s
        return replace(statistics, goodput_bytes_per_s=goodput, pending_bytes=gauges.pending_bytes)

    def _order(self, transfer_id: str, table: tuple[int, ...], num_tokens: int, layer: int | None) -> Publish:
        told = self._told.get(transfer_id)
        if told == (table, num_tokens):
            require_layer(self._memory, layer)
            return Publish(transfer_id, None, num_tokens, layer)
        require_table(self._memory, table, num_tokens, layer)
        if told is not None:
            self._told[transfer_id] = (table, num_tokens)
        return Publish(transfer_id, table, num_tokens, layer)


class OutboardReceiver:
    """A KVReceiver; see the top of the file."""

    def __init__(self, memory: KVMemory, fingerprint: Fingerprint, options: TransferOptions | None = None) -> None:
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
        self.outboard.hold(self._memory.fence())  # blocks may still be read by what was issued for their former owner
        self.outboard.tell(Load(load))

    def cancel(self, transfer_id: str, detail: str) -> None:
        """Stop the wire and end as cancelled unless ended."""
        self.outboard.tell(Abandon(transfer_id, detail))

    def statistics(self) -> TransferStatistics:
        gauges = self.outboard.inspect()
        statistics = self._ledger.statistics(gauges.num_connections, gauges.num_connections_by_medium)
        return replace(statistics, pending_bytes=gauges.pending_bytes)


def _is_outboard(memory: KVMemory, options: TransferOptions) -> bool:
    can = isinstance(memory, DeviceMemory) or (isinstance(memory, HostMemory) and memory.shared_fd is not None)
    if options.io == "process" and not can:
        raise ConfigError(
            "transfer.io process needs KV memory that can be shared, which this engine's is not: use auto."
        )
    return can and options.io != "threads"


def _stay_inside(error: OSError, options: TransferOptions) -> None:
    """Say that threads of this process move the KV, where any would do; StartupError where a process was asked for."""
    if options.io == "process":
        raise StartupError(f"There can be no KV I/O process ({error}): set transfer.io to auto or threads.") from None
    logger.warning("KV is moved by threads of the engine's process: there can be no I/O process (%s).", error)


def _spawn(*fds: int) -> subprocess.Popen[bytes]:
    # the child finds this very package, whatever made it importable here; stdout belongs to the worker's ready line
    package_path = str(Path(tollbridge.__file__).parents[1])
    path = os.pathsep.join(filter(None, [package_path, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "tollbridge.transfer.outboard_main", *map(str, fds)],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )
