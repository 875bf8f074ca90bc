"""The runs of one model: lengths alone, eight at once, and steady decodes while prefills arrive; arms alternate."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp
import numpy as np

from benchmarks.gpu import legs
from benchmarks.gpu.servers import Pair
from benchmarks.support.client import Stream, stream

LENGTHS = (512, 2048, 4096)
CONCURRENCY = 8
LONG_TOKENS, LONG_OUTPUT = 2048, 128
STEADY_STREAMS = 8

Send = Callable[[list[int], int], Awaitable[Stream]]


@dataclass
class Runner:
    """The load generator of one model; arms are "single" and the transports of `pairs`."""

    session: aiohttp.ClientSession
    pairs: dict[str, Pair]
    rng: random.Random
    repetitions: int

    @property
    def arms(self) -> list[str]:
        return ["single", *self.pairs]

    def sender(self, arm: str) -> Send:
        """Return how a request is sent in `arm`; "single" uses the decode server of the first pair, alone."""
        if arm == "single":
            server = next(iter(self.pairs.values())).decode
            return lambda prompt, n: legs.single(self.session, server, prompt, n)
        pair = self.pairs[arm]
        return lambda prompt, n: legs.split(self.session, pair, prompt, n)

    async def warm_up(self) -> None:
        """Two requests of each length by each arm: compilation, graphs and connections."""
        for arm in self.arms:
            send = self.sender(arm)
            for length in (*LENGTHS, LONG_TOKENS):
                await checked(send(legs.draw(self.rng, length), 4))
            await asyncio.gather(*(checked(send(legs.draw(self.rng, LONG_TOKENS), 16)) for _ in range(CONCURRENCY)))

    async def alone(self) -> dict[str, dict[str, list[float]]]:
        """Return TTFT in ms by arm and length, one request at a time."""
        times: dict[str, dict[str, list[float]]] = {arm: {str(n): [] for n in LENGTHS} for arm in self.arms}
        for _ in range(self.repetitions):
            for length in LENGTHS:
                for arm in self.arms:
                    done = await checked(self.sender(arm)(legs.draw(self.rng, length), 2))
                    times[arm][str(length)].append(1e3 * done.ttft_s)
        return times

    async def together(self) -> dict[str, dict[str, list[float]]]:
        """Return TTFT p50, tokens/s and ITL p99 by arm, eight requests at once, one value a repetition."""
        found: dict[str, dict[str, list[float]]] = {
            arm: {"ttft_p50_ms": [], "tokens_per_s": [], "itl_p99_ms": []} for arm in self.arms
        }
        for _ in range(self.repetitions):
            for arm in self.arms:
                send = self.sender(arm)
                start_s = time.monotonic()
                prompts = [legs.draw(self.rng, LONG_TOKENS) for _ in range(CONCURRENCY)]
                done = await asyncio.gather(*(checked(send(prompt, LONG_OUTPUT)) for prompt in prompts))
                took_s = time.monotonic() - start_s
                gaps = [gap for one in done for gap in one.gaps_s()]
                found[arm]["ttft_p50_ms"].append(1e3 * float(np.median([one.ttft_s for one in done])))
                found[arm]["tokens_per_s"].append(CONCURRENCY * LONG_OUTPUT / took_s)
                found[arm]["itl_p99_ms"].append(1e3 * float(np.percentile(gaps, 99)))
        return found

    async def steady(self, seconds: float, interval_s: float) -> dict[str, dict[str, float]]:
        """Return ITL p50, p99 and max in ms of steady decodes while prefills arrive every `interval_s`, by arm."""
        return {arm: await self._steady(arm, seconds, interval_s) for arm in self.arms}

    async def _steady(self, arm: str, seconds: float, interval_s: float) -> dict[str, float]:
        # the steady streams decode where this arm decodes; their own prompts are short and served there
        server = next(iter(self.pairs.values())).decode if arm == "single" else self.pairs[arm].decode
        streams = [Stream() for _ in range(STEADY_STREAMS)]
        tasks = [
            asyncio.create_task(stream(self.session, server.url, legs.body(legs.draw(self.rng, 32), 6000), into=one))
            for one in streams
        ]
        try:
            await asyncio.gather(*(one.warm.wait() for one in streams))
            start_s = time.monotonic()
            arrivals = []
            while time.monotonic() - start_s < seconds:
                arrivals.append(asyncio.create_task(self._arrive(arm)))
                await asyncio.sleep(interval_s)
            end_s = time.monotonic()
            ttft_ms = [1e3 * one.ttft_s for one in await asyncio.gather(*arrivals)]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        gaps_ms = [1e3 * gap for one in streams for gap in one.gaps_s(start_s, end_s)]
        p50, p99 = np.percentile(gaps_ms, [50, 99])
        return {
            "itl_p50_ms": float(p50), "itl_p99_ms": float(p99), "itl_max_ms": max(gaps_ms),
            "ttft_p50_ms": float(np.median(ttft_ms)), "arrivals": len(ttft_ms),
        }  # fmt: skip

    async def _arrive(self, arm: str) -> Stream:
        return await checked(self.sender(arm)(legs.draw(self.rng, LONG_TOKENS), 2))


async def checked(request: Awaitable[Stream]) -> Stream:
    """Return what `request` returns; RuntimeError when it failed."""
    done = await request
    if done.error or not done.arrivals_s:
        raise RuntimeError(f"a request failed: {done.error or 'no token came'}")
    return done
