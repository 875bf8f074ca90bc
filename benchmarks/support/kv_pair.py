"""The driver's view of two KV nodes on the hosts of a link: one method per thing that is measured."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.support.cgroup import MemoryGauge
from benchmarks.support.kv_shape import KVShape
from benchmarks.support.node import Node
from tollbridge.bench.netns import ADDRESSES, Link

KV_NODE = "benchmarks.support.kv_node:KVNode"


@dataclass(frozen=True, kw_only=True)
class Copy:
    """One measured copy of `num_bytes`."""

    num_bytes: int
    seconds: float
    send_cpu_s: float = float("nan")
    receive_cpu_s: float = float("nan")
    each_s: dict[str, float] = field(default_factory=dict)  # by transfer id, from its own opening
    num_frames: int = 0

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Engine steps of one window, and the goodput meanwhile."""

    median_s: float
    count: int
    bytes_per_s: float


class KVPair:
    """Prefill on host a, decode on host b."""

    def __init__(
        self, a: Node, b: Node, shape: KVShape, options: Mapping[str, Any], *, host: str = ADDRESSES["a"]
    ) -> None:
        self.a, self.b, self.shape, self._host = a, b, shape, host
        self.gauge: MemoryGauge | None = None  # of prefill's memory, when it has a group
        self.scattered = (shape.table(1), shape.table(2))  # of prefill, of decode
        self.contiguous = (shape.table(None), shape.table(None))
        a.call("prepare", shape=shape.json(), seed=7)
        b.call("prepare", shape=shape.json(), seed=None)
        self._raw_port = a.call("raw_listen", host=host)
        self._raw_streams = 0
        self.address = a.call("kv_sender", host=host, options=dict(options))
        b.call("kv_receiver", options=dict(options))

    def raw(self, streams: int = 1) -> Copy:
        """Copy as many bytes over plain sockets (connected before the clock starts)."""
        if streams != self._raw_streams:
            self.a.begin("raw_accept", streams=streams)
            self.b.call("raw_connect", host=self._host, port=self._raw_port, streams=streams)
            self.a.result()
            self._raw_streams = streams
        self.a.begin("raw_send")
        received = self.b.call("raw_receive")
        sent = self.a.result()
        return Copy(
            num_bytes=self.shape.num_bytes,
            seconds=received["seconds"],
            send_cpu_s=sent["cpu_s"],
            receive_cpu_s=received["cpu_s"],
        )

    def kv(self, tables: tuple[list[int], list[int]] | None = None, *, count: int = 1) -> Copy:
        """Move `count` transfers of the whole shape at once, all computed when decode asks."""
        return self.transfers([self.shape.num_tokens] * count, tables=tables)

    def transfers(
        self,
        num_tokens: Sequence[int],
        *,
        at_s: Sequence[float] | None = None,
        tables: tuple[list[int], list[int]] | None = None,
    ) -> Copy:
        """Move transfers of so many tokens, each opened at its time (None: all at once)."""
        source, destination = tables or self.scattered
        ids = [secrets.token_hex(16) for _ in num_tokens]
        transfers = dict(zip(ids, num_tokens, strict=True))
        when_s = None if at_s is None else dict(zip(ids, at_s, strict=True))
        self.a.begin("kv_offer", transfers=transfers, table=source)
        received = self.b.call("kv_load", transfers=transfers, table=destination, address=self.address, at_s=when_s)
        sent = self.a.result()
        return Copy(
            num_bytes=sum(num_tokens) * self.shape.num_bytes // self.shape.num_tokens,
            seconds=received["seconds"],
            send_cpu_s=sent["cpu_s"],
            receive_cpu_s=received["cpu_s"],
            each_s=received["each_s"],
            num_frames=received["num_frames"],
        )

    def overlapped(self, begin_s: float, prefill_s: float, num_chunks: int) -> float:
        """Move one transfer while a clocked prefill from `begin_s` on publishes it; return when decode had it all."""
        source, destination = self.scattered
        transfer_id = secrets.token_hex(16)
        self.a.begin(
            "kv_produce",
            transfer_id=transfer_id,
            table=source,
            chunks=num_chunks,
            begin_s=begin_s,
            prefill_s=prefill_s,
        )
        wanted = {transfer_id: self.shape.num_tokens}
        at_s = {transfer_id: begin_s}
        received = self.b.call("kv_load", transfers=wanted, table=destination, address=self.address, at_s=at_s)
        self.a.result()
        return float(received["ended_s"][transfer_id]) - begin_s

    def steps(self, window_s: float, transfer_bytes_per_s: float | None) -> Steps:
        """Time engine steps in the prefill process for `window_s`, with transfers at full rate all along, or none.

        `transfer_bytes_per_s` is what the link can carry: so many transfers are opened that they outlast the window.
        """
        engine_core, io_core = cores()
        source, destination = self.scattered
        count = 0 if transfer_bytes_per_s is None else 1 + int(window_s * transfer_bytes_per_s / self.shape.num_bytes)
        transfers = {secrets.token_hex(16): self.shape.num_tokens for _ in range(count)}
        arguments = {"window_s": window_s, "engine_core": engine_core, "io_core": io_core}
        self.a.begin("engine_steps", transfers=transfers, table=source, **arguments)
        seconds = float("inf")
        if transfers:
            load = {"transfers": transfers, "table": destination, "address": self.address}
            seconds = self.b.call("kv_load", **load)["seconds"]
        timed = self.a.result()
        return Steps(
            median_s=timed["median_s"], count=timed["count"], bytes_per_s=count * self.shape.num_bytes / seconds
        )

    def verify(self) -> None:
        """Wipe the destination, move one transfer, and compare: RuntimeError unless every byte is the same."""
        source, destination = self.scattered
        self.b.call("wipe")
        self.kv()
        if self.a.call("hash", table=source) != self.b.call("hash", table=destination):
            raise RuntimeError("what arrived is not what was sent")


@contextlib.contextmanager
def kv_pair(
    joined: Link,
    shape: KVShape,
    options: Mapping[str, Any] | None = None,
    *,
    prefill_group: Callable[[int], AbstractContextManager[MemoryGauge]] | None = None,
) -> Iterator[KVPair]:
    """Start both nodes, each pinned to a core of its own, verify one transfer, and stop them at the end.

    `prefill_group` takes the prefill process, by its id, under a memory limit before it allocates.
    """
    core_a, core_b = cores()
    with contextlib.ExitStack() as stack:
        b = stack.enter_context(Node(KV_NODE, core=core_b, prefix=joined.command("b", [])))
        a = Node(KV_NODE, core=core_a, prefix=joined.command("a", []))
        gauge = stack.enter_context(prefill_group(a.pid)) if prefill_group is not None else None
        stack.enter_context(a)  # ends before its group is removed
        pair = KVPair(a, b, shape, options or {})
        pair.gauge = gauge
        pair.verify()
        yield pair


@contextlib.contextmanager
def local_pair(shape: KVShape, options: Mapping[str, Any], environ: dict[str, str] | None = None) -> Iterator[KVPair]:
    """Start both nodes on this host, without namespaces: what media between neighbours need."""
    core_a, core_b = cores()
    with Node(KV_NODE, core=core_a, environ=environ) as a, Node(KV_NODE, core=core_b, environ=environ) as b:
        pair = KVPair(a, b, shape, options, host="127.0.0.1")
        pair.verify()
        yield pair


def cores() -> tuple[int, int]:
    """Return a core for each host; the same one twice when there is no other."""
    allowed = sorted(os.sched_getaffinity(0))
    return (allowed[0], allowed[1]) if len(allowed) > 1 else (allowed[0], allowed[0])
