"""The runs of one model: requests alone, several at once, steady decodes while prefills arrive; arms alternate."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.gpu import legs
from benchmarks.support.client import Stream

LENGTHS = (512, 2048, 4096)
CONCURRENCY = 8
LONG_TOKENS, LONG_OUTPUT = 2048, 128
STEADY_STREAMS = 8
STEADY_PROMPT, STEADY_OUTPUT = 32, 6000


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A way to serve a request. `send` and `steady` take a prompt, the tokens to generate, and the Stream to fill."""

    send: Callable[[list[int], int, Stream], Awaitable[Stream]]
    steady: Callable[[list[int], int, Stream], Awaitable[Stream]]  # a stream that decodes for long; its prompt is short


@dataclass
class Runner:
    """The load generator of one model."""

    arms: Mapping[str, Arm]
    rng: random.Random
    repetitions: int

    async def send(self, arm: str, num_tokens: int, num_output: int) -> Stream:
        """Send one request of random tokens; RuntimeError when it fails."""
        done = await self.arms[arm].send(legs.draw(self.rng, num_tokens), num_output, Stream())
        if done.error or not done.arrivals_s:
            raise RuntimeError(f"a request failed in arm {arm}: {done.error or 'no token came'}")
        return done

    async def warm_up(self, lengths: Sequence[int] = LENGTHS, concurrency: int = CONCURRENCY) -> None:
        """A request of each length, then several at once, by each arm: compilation, graphs and connections."""
        for arm in self.arms:
            for length in (*lengths, LONG_TOKENS):
                await self.send(arm, length, 4)
            await asyncio.gather(*(self.send(arm, LONG_TOKENS, 16) for _ in range(concurrency)))

    async def alone(
        self, lengths: Sequence[int] = LENGTHS, repetitions: int | None = None
    ) -> dict[str, dict[str, list[float]]]:
        """Return TTFT in ms by arm and length, one request at a time."""
        times: dict[str, dict[str, list[float]]] = {arm: {str(n): [] for n in lengths} for arm in self.arms}
        for _ in range(repetitions or self.repetitions):
            for length in lengths:
                for arm in self.arms:
                    times[arm][str(length)].append(1e3 * (await self.send(arm, length, 2)).ttft_s)
        return times

    async def together(
        self, concurrency: int = CONCURRENCY, repetitions: int | None = None
    ) -> dict[str, dict[str, list[float]]]:
        """Return figures by arm, one value a repetition: that many requests at once, all sent at the same moment."""
        found: dict[str, dict[str, list[float]]] = {arm: {} for arm in self.arms}
        for _ in range(repetitions or self.repetitions):
            for arm in self.arms:
                for name, value in (await self._burst(arm, concurrency)).items():
                    found[arm].setdefault(name, []).append(value)
        return found

    async def _burst(self, arm: str, concurrency: int) -> dict[str, float]:
        start_s = time.monotonic()
        done = await asyncio.gather(*(self.send(arm, LONG_TOKENS, LONG_OUTPUT) for _ in range(concurrency)))
        took_s = time.monotonic() - start_s
        gaps_s = [gap for one in done for gap in one.gaps_s()]
        ttft_s = [one.ttft_s for one in done]
        return {
            "ttft_p50_ms": 1e3 * float(np.median(ttft_s)),
            "ttft_max_ms": 1e3 * max(ttft_s),
            "tokens_per_s": concurrency * LONG_OUTPUT / took_s,
            "itl_p50_ms": 1e3 * float(np.median(gaps_s)),
            "itl_p99_ms": 1e3 * float(np.percentile(gaps_s, 99)),
            "itl_max_ms": 1e3 * max(gaps_s),
        }

    async def steady(self, seconds: float, interval_s: float) -> dict[str, dict[str, float]]:
        """Return ITL p50, p99 and max in ms of steady decodes while prefills arrive every `interval_s`, by arm."""
        return {arm: await self.steady_one(arm, seconds, interval_s) for arm in self.arms}

    async def steady_one(
        self, arm: str, seconds: float, interval_s: float, num_streams: int = STEADY_STREAMS
    ) -> dict[str, float]:
        """The same for one arm."""
        streams = [Stream() for _ in range(num_streams)]
        steady = self.arms[arm].steady
        tasks = [
            asyncio.ensure_future(steady(legs.draw(self.rng, STEADY_PROMPT), STEADY_OUTPUT, one)) for one in streams
        ]
        try:
            await asyncio.gather(*(one.warm.wait() for one in streams))
            start_s = time.monotonic()
            arrivals = []
            while time.monotonic() - start_s < seconds:
                arrivals.append(asyncio.create_task(self.send(arm, LONG_TOKENS, 2)))
                await asyncio.sleep(interval_s)
            end_s = time.monotonic()
            ttft_ms = [1e3 * one.ttft_s for one in await asyncio.gather(*arrivals)]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if any(one.error for one in streams):
            raise RuntimeError(f"a steady stream failed in arm {arm}: {max(one.error for one in streams)}")
        gaps_ms = [1e3 * gap for one in streams for gap in one.gaps_s(start_s, end_s)]
        p50, p99 = np.percentile(gaps_ms, [50, 99])
        return {
            "itl_p50_ms": float(p50), "itl_p99_ms": float(p99), "itl_max_ms": max(gaps_ms),
            "ttft_p50_ms": float(np.median(ttft_ms)), "ttft_max_ms": max(ttft_ms), "arrivals": len(ttft_ms),
        }  # fmt: skip
