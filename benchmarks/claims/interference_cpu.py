"""Do long prefills stall the tokens of those who decode? Split, against local on one worker and on both.

Two embedded workers, one core each (p0 on core 0, d0 on core 1); router and client share core 0 with p0. Running
streams decode while long prompts arrive at a fixed rate such that prefill keeps p0 at most 70 % busy. For each arm the
pooled ITL p99 of the running streams while prefills arrive is divided by their ITL p99 in an idle window of the same
arm. Arms are taken in rotated order, once per repetition.

    split       streams and prompts by the router, policy split: p0 prefills, d0 decodes
    local-one   streams and prompts sent to d0 itself: one worker does both
    local-both  streams and prompts by the router, policy local: both workers do both (the fair rival: same two cores)

The claim holds when split stays within 1.5 of its idle value and neither local arm does.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import numpy as np

from benchmarks.support.client import Stream, stream
from benchmarks.support.metrics import scrape
from benchmarks.support.result import ClaimResult, Table
from tollbridge.bench.fleet import Fleet, running

DESCRIPTION = "ITL p99 of running streams while long prefills arrive: split stays flat, local does not"

NUM_STREAMS = 4
STREAM_PROMPT_TOKENS = 32
LONG_PROMPT_TOKENS = 768
LONG_OUTPUT_TOKENS = 2
UTILISATION = 0.55  # of p0 by the long prefills alone; the bound is 0.7, measured
MAX_BUSY = 0.7
MAX_RATIO = 1.5
VOCABULARY = (100, 40_000)  # ids to draw prompts from: ordinary tokens of SmolLM2

ARMS = ("split", "local-one", "local-both")


@dataclass(frozen=True)
class Window:
    """Pooled gaps of the running streams over one window, and how busy prefill kept p0."""

    gaps_s: list[float]
    p0_busy: float
    num_prefills: int
    prefill_ttft_s: list[float]

    def percentile(self, q: float) -> float:
        return float(np.percentile(self.gaps_s, q))


@dataclass(frozen=True)
class Durations:
    repetitions: int
    idle_s: float
    busy_s: float


def run(quick: bool) -> ClaimResult:
    """Measure, and return the claim's verdict."""
    durations = Durations(1, 8.0, 24.0) if quick else Durations(5, 8.0, 24.0)
    return asyncio.run(_measure(durations))


async def _measure(durations: Durations) -> ClaimResult:
    os.sched_setaffinity(0, {0})
    workers: list[dict[str, object]] = [
        {"name": "p0", "prefer": "prefill", "cores": [0], "host": "node-a"},
        {"name": "d0", "prefer": "decode", "cores": [1], "host": "node-a"},
    ]
    engine: dict[str, object] = {"kv_cache_mib": 512, "threads": 1}
    seed = secrets.randbits(32)
    async with running(model="smollm2", workers=workers, router_cores=[0], engine=engine) as fleet:
        bench = Bench(fleet, random.Random(seed))
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_read=120)) as session:
            bench.session = session
            interval_s = await bench.calibrate() / UTILISATION
            windows: dict[str, list[tuple[Window, Window]]] = {arm: [] for arm in ARMS}
            for repetition in range(durations.repetitions):
                for arm in ARMS[repetition % 3 :] + ARMS[: repetition % 3]:
                    idle = await bench.window(arm, durations.idle_s, None)
                    busy = await bench.window(arm, durations.busy_s, interval_s)
                    windows[arm].append((idle, busy))
    return _verdict(windows, interval_s, seed, durations)


class Bench:
    """The load generator."""

    def __init__(self, fleet: Fleet, rng: random.Random) -> None:
        self.fleet, self.rng = fleet, rng
        self.session: aiohttp.ClientSession

    def body(self, num_tokens: int, max_tokens: int) -> dict[str, object]:
        prompt = [self.rng.randint(*VOCABULARY) for _ in range(num_tokens)]
        return {
            "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip

    def way(self, arm: str) -> tuple[str, str | None]:
        """Return (url, policy) of an arm."""
        if arm == "local-one":
            return self.fleet.url("d0"), None
        return self.fleet.url("router"), "split" if arm == "split" else "local"

    async def calibrate(self) -> float:
        """Return the seconds that one long prefill takes on an idle p0 (median of three)."""
        times = []
        for _ in range(3):
            done = await stream(self.session, self.fleet.url("p0"), self.body(LONG_PROMPT_TOKENS, 1))
            times.append(done.ttft_s)
        return float(np.median(times))

    async def window(self, arm: str, seconds: float, interval_s: float | None) -> Window:
        """Keep streams running for `seconds`, with a long prompt every `interval_s` (None: no prompts)."""
        async with self.streams(arm) as streams:
            before = await scrape(self.session, self.fleet.url("p0"))
            start_s = time.monotonic()
            prefills = await self.arrivals(arm, start_s, seconds, interval_s)
            end_s = time.monotonic()
            after = await scrape(self.session, self.fleet.url("p0"))
        errors = [s.error for s in [*streams, *prefills] if s.error]
        if errors:
            raise RuntimeError(f"{arm}: {errors[0]}")
        name = "vllm:request_prefill_time_seconds_sum"
        return Window(
            gaps_s=[gap for s in streams for gap in s.gaps_s(start_s, end_s)],
            p0_busy=(after.get(name, 0.0) - before.get(name, 0.0)) / (end_s - start_s),
            num_prefills=len(prefills),
            prefill_ttft_s=[s.ttft_s for s in prefills if s.arrivals_s],
        )

    @asynccontextmanager
    async def streams(self, arm: str) -> AsyncIterator[list[Stream]]:
        """Run the streams, all past their first tokens, until the block ends."""
        url, policy = self.way(arm)
        streams = [Stream() for _ in range(NUM_STREAMS)]
        tasks = [
            asyncio.create_task(stream(self.session, url, self.body(STREAM_PROMPT_TOKENS, 6000), policy=policy, into=s))
            for s in streams
        ]
        try:
            await asyncio.gather(*(s.warm.wait() for s in streams))
            yield streams
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def arrivals(self, arm: str, start_s: float, seconds: float, interval_s: float | None) -> list[Stream]:
        """Send a long prompt every `interval_s`; return when `seconds` have passed and all have ended."""
        if interval_s is None:
            await asyncio.sleep(seconds)
            return []
        url, policy = self.way(arm)
        tasks = []
        for index in range(max(1, int(seconds / interval_s))):
            await asyncio.sleep(max(0.0, start_s + (index + 0.25) * interval_s - time.monotonic()))
            body = self.body(LONG_PROMPT_TOKENS, LONG_OUTPUT_TOKENS)
            tasks.append(asyncio.create_task(stream(self.session, url, body, policy=policy)))
        done = list(await asyncio.gather(*tasks))
        await asyncio.sleep(max(0.0, start_s + seconds - time.monotonic()))
        return done


def _figures(windows: list[tuple[Window, Window]]) -> dict[str, float]:
    """Return the figures of one arm from its (idle, busy) pairs."""
    ratios = [busy.percentile(99) / idle.percentile(99) for idle, busy in windows]
    idle_ms = [1e3 * gap for idle, _ in windows for gap in idle.gaps_s]
    busy_ms = [1e3 * gap for _, busy in windows for gap in busy.gaps_s]
    ttft_ms = [1e3 * t for _, busy in windows for t in busy.prefill_ttft_s]
    return {
        "itl_p99_ratio": float(np.median(ratios)),
        "itl_p99_ratio_min": min(ratios),
        "itl_p99_ratio_max": max(ratios),
        "idle_itl_p50_ms": float(np.percentile(idle_ms, 50)),
        "idle_itl_p99_ms": float(np.percentile(idle_ms, 99)),
        "itl_p50_ms": float(np.percentile(busy_ms, 50)),
        "itl_p99_ms": float(np.percentile(busy_ms, 99)),
        "itl_max_ms": max(busy_ms),
        "long_ttft_p50_ms": float(np.median(ttft_ms)),
        "p0_prefill_busy": float(np.mean([busy.p0_busy for _, busy in windows])),
        "num_gaps": len(busy_ms),
        "num_prefills": sum(busy.num_prefills for _, busy in windows),
    }


def _verdict(
    windows: dict[str, list[tuple[Window, Window]]], interval_s: float, seed: int, durations: Durations
) -> ClaimResult:
    figures = {arm: _figures(windows[arm]) for arm in ARMS}
    flat = figures["split"]["itl_p99_ratio"] <= MAX_RATIO and figures["split"]["p0_prefill_busy"] <= MAX_BUSY
    stalled = all(figures[arm]["itl_p99_ratio"] > MAX_RATIO for arm in ARMS[1:])
    rows = [
        [name, *(f"{figures[arm][name]:.{2 if 'ratio' in name or 'busy' in name else 0}f}" for arm in ARMS)]
        for name in figures["split"]
    ]
    return ClaimResult(
        holds=flat and stalled,
        figures=figures,
        bounds={
            "split.itl_p99_ratio": f"<= {MAX_RATIO}",
            "local-one.itl_p99_ratio": f"> {MAX_RATIO}",
            "local-both.itl_p99_ratio": f"> {MAX_RATIO}",
            "split.p0_prefill_busy": f"<= {MAX_BUSY}",
        },
        conditions={
            "model": "SmolLM2-135M-Instruct (Q4_1 weights, dequantised)",
            "streams": NUM_STREAMS,
            "long_prompt_tokens": LONG_PROMPT_TOKENS,
            "arrival_interval_s": round(interval_s, 3),
            "repetitions": durations.repetitions,
            "window_s": durations.busy_s,
            "seed": seed,
            "cores": "p0, router and client on core 0; d0 on core 1",
            "definitions": "ITL: every gap between two tokens of the running streams, pooled over the window",
        },
        table=Table(
            title="ITL of running streams, idle and while long prefills arrive",
            columns=["figure", *ARMS],
            rows=rows,
        ),
    )
