"""How much load does one process of the bench's client carry before it lags?

An upstream that computes nothing, one process on a core of its own, and the client on another. Open loop, even gaps:

    requests   2,000 requests/s, answers of 2 chunks, all written at once
    chunks     20,000 chunks/s: 400 streams of 50 chunks/s, each chunk written by itself

The claim holds when the send lag (actual - due) has a p99 of at most 5 ms in both, the load was reached, and nothing
failed.
"""

from __future__ import annotations

import asyncio
import math
import os
import resource
import statistics
from dataclasses import dataclass

import uvloop

from benchmarks.support.bare import trivial
from benchmarks.support.result import ClaimResult, Table
from tollbridge.bench.client import Client, Target
from tollbridge.bench.load import Load, Shape
from tollbridge.bench.records import Planned, Sample
from tollbridge.bench.stats import percentile

DESCRIPTION = "one client process sends 2,000 requests/s, or takes 20,000 chunks/s, with send lag p99 of at most 5 ms"

MAX_LAG_MS = 5.0


@dataclass(frozen=True)
class Case:
    requests_per_s: int
    chunks: int  # of an answer
    upstream: str
    lasts_s: float  # an answer


CASES = {
    "requests": Case(2000, 2, "benchmarks.support.trivial", 0.0),
    "chunks": Case(80, 250, "benchmarks.support.paced", 5.0),
}


def run(quick: bool) -> ClaimResult:
    """Measure, and return the claim's verdict."""
    seconds, repetitions = (10.0, 1) if quick else (15.0, 3)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            seen = {
                name: [runner.run(_once(case, seconds, cores[-1])) for _ in range(repetitions)]
                for name, case in CASES.items()
            }
    finally:
        os.sched_setaffinity(0, cores)
    return _verdict(seen, seconds, len(cores) > 1)


async def _once(case: Case, seconds: float, core: int) -> dict[str, float]:
    times = [at / case.requests_per_s for at in range(int(case.requests_per_s * seconds))]
    planned = [Planned(at_s=at_s, prompt=[1, 2, 3], max_tokens=case.chunks) for at_s in times]
    async with trivial(case.chunks, core=core, module=case.upstream) as url, Client() as client:
        load = Load(client, Target.at(url, "/v1/completions", {}), {"stream": True})
        before = resource.getrusage(resource.RUSAGE_SELF)
        samples, took_s = await load.run(Shape(cell="", block=0, arm=""), list(enumerate(planned)))
        after = resource.getrusage(resource.RUSAGE_SELF)
    return _figures(case, samples, took_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def _figures(case: Case, samples: list[Sample], took_s: float, cpu_s: float) -> dict[str, float]:
    lags = [1e3 * sample.lag_s for sample in samples]
    return {
        "requests_per_s": len(samples) / (took_s - case.lasts_s),
        "chunks_per_s": _chunks_per_s(case, samples),
        "lag_p50_ms": percentile(lags, 50),
        "lag_p99_ms": percentile(lags, 99),
        "lag_max_ms": max(lags),
        "failed": float(sum(not sample.ok for sample in samples)),
        "cpu_share": cpu_s / took_s,
    }


def _chunks_per_s(case: Case, samples: list[Sample]) -> float:
    """Return the rate of arrivals between the first answer's end and the last request."""
    ends = [sample.sent_s + (sample.latency_s or 0.0) for sample in samples]
    begin_s, end_s = min(ends), max(sample.sent_s for sample in samples)
    arrived = 0
    for sample in samples:
        at_s = sample.sent_s + (sample.ttft_s or math.inf)
        arrived += begin_s <= at_s < end_s
        for gap in sample.gaps_s:
            at_s += gap
            arrived += begin_s <= at_s < end_s
    return arrived / (end_s - begin_s)


def _verdict(seen: dict[str, list[dict[str, float]]], seconds: float, apart: bool) -> ClaimResult:
    figures = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in seen.items()
    }
    kept = (
        figures["requests"]["requests_per_s"] >= 0.98 * CASES["requests"].requests_per_s
        and figures["chunks"]["chunks_per_s"] >= 0.98 * CASES["chunks"].requests_per_s * CASES["chunks"].chunks
    )
    holds = kept and all(f["lag_p99_ms"] <= MAX_LAG_MS and not f["failed"] for f in figures.values())
    return ClaimResult(
        holds=holds,
        figures=figures,
        bounds={"requests.lag_p99_ms": f"<= {MAX_LAG_MS:g}", "chunks.lag_p99_ms": f"<= {MAX_LAG_MS:g}",
                "requests.requests_per_s": ">= 1960", "chunks.chunks_per_s": ">= 19600"},
        conditions={
            "seconds": seconds,
            "repetitions": len(seen["requests"]),
            "cores": "client and upstream on a core each" if apart else "client and upstream share a core",
        },
        table=Table(
            title="One client process over a trivial upstream, medians",
            columns=["figure", *figures],
            rows=[[key, *(f"{figures[name][key]:,.2f}" for name in figures)] for key in figures["requests"]],
        ),
    )  # fmt: skip
