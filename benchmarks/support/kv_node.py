"""One side of a transfer as a node: a prefaulted cache, a TcpSender or TcpReceiver, and a raw socket to compare with.

Times between nodes are CLOCK_MONOTONIC, which all namespaces of a machine share.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64

from benchmarks.support.engine_step import timed_steps
from benchmarks.support.kv_shape import BLOCK_TOKENS, KVShape
from benchmarks.support.raw import RawSink, RawSource
from tollbridge.transfer.base import Fingerprint, KVReceiver, KVSender, LoadRequest, TransferEnd, content_digest
from tollbridge.transfer.memory import BufferMemory
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.outboard import make_receiver, make_sender
from tollbridge.transfer.shared import SharedBuffer

SECRET = b"benchmark"
DIGEST = content_digest([1, 2, 3])
WAIT_S = 240.0
PATIENCE = {"progress_timeout_s": 30.0}  # a machine that stands still for seconds shows in the spread, and ends nothing


class KVNode:
    """See the top of the file. Every method takes and returns JSON values."""

    def __init__(self) -> None:
        self._raw_source: RawSource | None = None
        self._raw_sink = RawSink()
        self._changed = threading.Event()
        self._ended: dict[str, TransferEnd] = {}
        self._ended_s: dict[str, float] = {}

    # ── memory ──

    def prepare(self, shape: dict[str, int], seed: int | None) -> None:
        """Allocate the cache and touch all of it: random bytes, zeros when there is no seed."""
        self.shape = KVShape(**shape)
        size = self.shape.num_layers * self.shape.cache_blocks * self.shape.block_bytes
        self._shared = SharedBuffer(size)  # so that the medium may run in a process of its own
        self._array = np.frombuffer(self._shared.data, dtype=np.uint8)
        if seed is None:
            self._array.fill(0)
        else:
            self._array[:] = np.tile(
                np.random.default_rng(seed).integers(0, 256, 999_983, np.uint8), size // 999_983 + 1
            )[:size]
        self._memory = BufferMemory(
            self._array,
            num_layers=self.shape.num_layers,
            num_blocks=self.shape.cache_blocks,
            block_size=BLOCK_TOKENS,
            token_bytes=self.shape.block_bytes // BLOCK_TOKENS,
        )
        self._memory.shared_fd = self._shared.fd

    def hash(self, table: Sequence[int]) -> str:
        """Return a digest of a request's bytes in token order, to see that the other side has the same."""
        digest = xxh3_64()
        for layer in range(self.shape.num_layers):
            for view in self._memory.views(layer, table, 0, self.shape.num_tokens):
                digest.update(view)
        return digest.hexdigest()

    def wipe(self) -> None:
        self._array.fill(0)

    # ── raw ──

    def raw_listen(self, host: str) -> int:
        self._raw_source = RawSource(host)
        return self._raw_source.port

    def raw_accept(self, streams: int) -> None:
        assert self._raw_source is not None
        self._raw_source.accept(streams)

    def raw_connect(self, host: str, port: int, streams: int) -> None:
        self._raw_sink.connect(host, port, streams)

    def raw_send(self) -> dict[str, float]:
        assert self._raw_source is not None
        cpu_s = _cpu_s()
        self._raw_source.send(self._flat())
        return {"cpu_s": _cpu_s() - cpu_s}

    def raw_receive(self) -> dict[str, float]:
        cpu_s = _cpu_s()
        seconds = self._raw_sink.receive(self._flat())
        return {"seconds": seconds, "cpu_s": _cpu_s() - cpu_s}

    def _flat(self) -> memoryview:
        return self._array.data[: self.shape.num_bytes]

    # ── KV ──

    def kv_sender(self, host: str, options: dict[str, Any]) -> tuple[str, int]:
        self._sender: KVSender = make_sender(
            self._memory,
            _fingerprint(self.shape),
            TransferOptions(secret=SECRET, bind_host=host, **{**PATIENCE, **options}),
        )
        self._side: KVSender | KVReceiver = self._sender
        self._side.set_listener(self._changed.set)
        return self._sender.address

    def kv_receiver(self, options: dict[str, Any]) -> None:
        self._receiver: KVReceiver = make_receiver(
            self._memory, _fingerprint(self.shape), TransferOptions(secret=SECRET, **{**PATIENCE, **options})
        )
        self._side = self._receiver
        self._side.set_listener(self._changed.set)

    def kv_close(self) -> None:
        self._side.close()

    def kv_statistics(self) -> dict[str, Any]:
        statistics = self._side.statistics()
        return {"num_connections": statistics.num_connections, "goodput_bytes_per_s": statistics.goodput_bytes_per_s}

    def kv_offer(self, transfers: dict[str, int], table: Sequence[int]) -> dict[str, float]:
        """Register and publish transfers (tokens by id) of one prompt each, all computed; wait until all have ended."""
        cpu_s = _cpu_s()
        for transfer_id, num_tokens in transfers.items():
            self._sender.register(transfer_id, digest=DIGEST, num_tokens=num_tokens)
            self._sender.publish(transfer_id, table, num_tokens)
        self._wait(transfers)
        return {"cpu_s": _cpu_s() - cpu_s}

    def kv_load(
        self,
        transfers: dict[str, int],
        table: Sequence[int],
        address: tuple[str, int],
        at_s: dict[str, float] | None = None,
    ) -> dict[str, Any]:
        """Open transfers, each at its time (None: now); return when each ended, counted from its own opening."""
        cpu_s = _cpu_s()
        opened_s: dict[str, float] = {}
        for transfer_id, num_tokens in transfers.items():
            if at_s is not None:
                self._sleep_until(at_s[transfer_id])
            opened_s[transfer_id] = time.monotonic()
            self._receiver.open(_load(transfer_id, address, num_tokens, table))
        self._wait(transfers)
        cpu_s = _cpu_s() - cpu_s
        first_s = min(opened_s.values())
        return {
            "seconds": max(self._ended_s[i] for i in transfers) - first_s,
            "each_s": {i: self._ended_s[i] - opened_s[i] for i in transfers},
            "ended_s": {i: self._ended_s[i] for i in transfers},
            "num_frames": sum(self._ended[i].num_frames for i in transfers),
            "cpu_s": cpu_s,
        }

    def kv_produce(
        self, transfer_id: str, table: Sequence[int], chunks: int, begin_s: float, prefill_s: float
    ) -> float:
        """Publish layer by layer, chunk by chunk, as a prefill from `begin_s` on would; wait for the end.

        Returns by how much the worst publication was late.
        """
        layers, tokens = self.shape.num_layers, self.shape.num_tokens
        self._sender.register(transfer_id, digest=DIGEST, num_tokens=tokens)
        late_s = 0.0
        for index, (until, layer) in enumerate((c, n) for c in range(1, chunks + 1) for n in range(layers)):
            due_s = begin_s + prefill_s * (index + 1) / (chunks * layers)
            time.sleep(max(0.0, due_s - time.monotonic()))
            self._sender.publish(transfer_id, table, tokens * until // chunks, layer=layer)
            late_s = max(late_s, time.monotonic() - due_s)
        self._wait([transfer_id])
        return late_s

    def engine_steps(
        self, window_s: float, engine_core: int, io_core: int, transfers: dict[str, int], table: Sequence[int]
    ) -> dict[str, float]:
        """Time steps in this thread on its core, while the I/O thread on its own serves `transfers`."""
        mine, others = threading.get_native_id(), set(_threads())
        _place([mine], engine_core)
        _place(others - {mine}, io_core)
        for transfer_id, num_tokens in transfers.items():
            self._sender.register(transfer_id, digest=DIGEST, num_tokens=num_tokens)
            self._sender.publish(transfer_id, table, num_tokens)
        time.sleep(0.3)  # decode has opened, and the link is full
        times_s = timed_steps(window_s - 0.3)
        self._wait(transfers)
        _place(_threads(), engine_core)
        return {"median_s": float(np.median(times_s)), "count": len(times_s)}

    def _wait(self, transfers: Iterable[str]) -> None:
        """Collect ends until all of `transfers` have one; RuntimeError when one was not done."""
        missing, deadline_s = set(transfers), time.monotonic() + WAIT_S
        while missing := missing - self._ended.keys():
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{len(missing)} transfers did not end within {WAIT_S:g} s")
            self._collect(1.0)

    def _sleep_until(self, when_s: float) -> None:
        while (left_s := when_s - time.monotonic()) > 0:
            self._collect(left_s)

    def _collect(self, timeout_s: float) -> None:
        """Take the ends that come within `timeout_s`, each with its time; return at the first ones."""
        if not self._changed.wait(timeout_s):
            return
        self._changed.clear()
        now_s = time.monotonic()
        for end in self._side.poll():
            if end.outcome != "done":
                raise RuntimeError(f"a transfer ended {end.outcome}: {end.reason} {end.detail}")
            self._ended[end.transfer_id] = end
            self._ended_s[end.transfer_id] = now_s


def _load(transfer_id: str, address: tuple[str, int], num_tokens: int, table: Sequence[int]) -> LoadRequest:
    return LoadRequest(
        transfer_id=transfer_id,
        host=address[0],
        port=address[1],
        digest=DIGEST,
        first_token=0,
        num_tokens=num_tokens,
        block_table=table,
    )


def _fingerprint(shape: KVShape) -> Fingerprint:
    return Fingerprint(
        model="benchmark",
        dtype="bfloat16",
        num_layers=shape.num_layers,
        num_kv_heads=8,
        head_size=shape.block_bytes // BLOCK_TOKENS // 32,
        block_size=BLOCK_TOKENS,
        layout="token-major:k,v",
    )


def _place(threads: Iterable[int], core: int) -> None:
    for thread in threads:
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, {core})


def _io_processes() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def _threads() -> list[int]:
    """Return the threads of this process and of its I/O process."""
    return [int(task.name) for pid in [os.getpid(), *_io_processes()] for task in Path(f"/proc/{pid}/task").iterdir()]


def _cpu_s() -> float:
    """Return the CPU time of this process and of its I/O process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    tasks = [task for pid in _io_processes() for task in Path(f"/proc/{pid}/task").iterdir()]
    return (
        usage.ru_utime + usage.ru_stime + 1e-9 * sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)
    )
