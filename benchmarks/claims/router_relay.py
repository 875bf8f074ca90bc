"""How many events can the router relay on one core, and how much later do they come?

Worker and clients are one process (benchmarks/support/spring.py) on one core, the router has the other. Rate: many
streams in lockstep, each with one event under way, so that every chunk the router relays holds exactly one event;
chunks are counted by the client. Latency: one stream, an event at a time, worker to client, through the router and
straight, in turns; the clock is that of one process. The router listens to every stream, as it does by default, so
that it could continue it elsewhere.

`chunks_per_cpu_s` is what the router takes by its own CPU time: the wall rate is at most that, and less when others use
its core or the other core is the slower one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np
import psutil
import uvloop

from benchmarks.support.bare import router_over
from benchmarks.support.quiet import Quiet
from benchmarks.support.result import ClaimResult, Table
from benchmarks.support.spring import CHUNK_BYTES, Ends

DESCRIPTION = "relayed SSE chunks per second on one core, and the latency that the router adds to an event"

STREAMS = 256
MIN_CHUNKS_PER_S = 25_000
MAX_ADDED_P50_S = 0.3e-3
PAUSE_S = 2e-3  # between two events of the one stream


@dataclass(frozen=True)
class Flood:
    """One repetition of many streams."""

    chunks: int
    events: int
    wall_s: float
    cpu_s: float  # of the router


def run(quick: bool) -> ClaimResult:
    """Measure, and return the claim's verdict."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure(repetitions=3 if quick else 9, seconds=4.0 if quick else 8.0))


async def _measure(*, repetitions: int, seconds: float) -> ClaimResult:
    ends, quiet = Ends(), Quiet()
    floods: list[Flood] = []
    added_s: dict[int, list[float]] = {50: [], 99: []}
    async with await ends.listen(), router_over([ends.url]) as (url, pid):
        with _cores_apart(pid) as pinned:
            await ends.lockstep(url, 8, 0.5)  # warm
            for _ in range(repetitions):
                quiet.wait()
                floods.append(await _flood(ends, url, pid, seconds))
                direct = await ends.latencies_s(ends.url, 400, PAUSE_S)
                through = await ends.latencies_s(url, 400, PAUSE_S)
                for q, seen in added_s.items():
                    seen.append(float(np.percentile(through, q) - np.percentile(direct, q)))
    return _verdict(floods, added_s, {"pinned": pinned, "quiet": str(quiet), "repetitions": repetitions})


@contextlib.contextmanager
def _cores_apart(router: int) -> Iterator[bool]:
    """Give the router a core of its own, and us another, where there are two; yield whether."""
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        yield False
        return
    ours, theirs = sorted(cores)[:2]
    os.sched_setaffinity(router, {theirs})
    os.sched_setaffinity(0, {ours})
    try:
        yield True
    finally:
        os.sched_setaffinity(0, cores)


async def _flood(ends: Ends, url: str, pid: int, seconds: float) -> Flood:
    loop, router = asyncio.get_running_loop(), psutil.Process(pid)
    start_s, before = loop.time(), router.cpu_times()
    chunks, events = await ends.lockstep(url, STREAMS, seconds)
    after = router.cpu_times()
    cpu_s = after.user + after.system - before.user - before.system
    return Flood(chunks=chunks, events=events, wall_s=loop.time() - start_s, cpu_s=cpu_s)


def _verdict(floods: list[Flood], added_s: dict[int, list[float]], conditions: dict[str, object]) -> ClaimResult:
    per_s = median(flood.chunks / flood.wall_s for flood in floods)
    per_cpu_s = median(flood.chunks / flood.cpu_s for flood in floods)
    merged = max(flood.events / flood.chunks for flood in floods)
    p50_s, p99_s = median(added_s[50]), median(added_s[99])
    rows = [
        ["chunks/s, wall", f"{per_s:,.0f}", f">= {MIN_CHUNKS_PER_S:,}"],
        ["chunks per CPU second of the router", f"{per_cpu_s:,.0f}", f">= {MIN_CHUNKS_PER_S:,}"],
        ["events per chunk", f"{merged:.3f}", "<= 1"],
        ["added p50, one stream", f"{p50_s * 1e3:.3f} ms", f"<= {MAX_ADDED_P50_S * 1e3:g} ms"],
        ["added p99, one stream", f"{p99_s * 1e3:.3f} ms", ""],
    ]
    return ClaimResult(
        holds=min(per_s, per_cpu_s) >= MIN_CHUNKS_PER_S and merged <= 1 and p50_s <= MAX_ADDED_P50_S,
        figures={
            "chunks_per_s": per_s,
            "chunks_per_cpu_s": per_cpu_s,
            "router_cpu_us_per_chunk": 1e6 / per_cpu_s,
            "router_busy_share": median(flood.cpu_s / flood.wall_s for flood in floods),
            "events_per_chunk": merged,
            "added_p50_s": p50_s,
            "added_p99_s": p99_s,
        },
        bounds={
            "chunks_per_s": f">= {MIN_CHUNKS_PER_S}",
            "chunks_per_cpu_s": f">= {MIN_CHUNKS_PER_S}",
            "events_per_chunk": "<= 1",
            "added_p50_s": f"<= {MAX_ADDED_P50_S:g}",
        },
        conditions={"streams": STREAMS, "chunk_bytes": CHUNK_BYTES, "pause_s": PAUSE_S, **conditions},
        table=Table(title="router-relay", columns=["", "measured", "bound"], rows=rows),
    )
