"""Goodput: the highest rate of Poisson arrivals at which a share of the requests meets both objectives.

A request counts when its TTFT, its TPOT, `(latency - TTFT) / (output - 1)`, and the p99 of its gaps are within the
objectives; one that fails does not. The rate is bracketed by doubling and then bisected; both ends of the bracket are
reported. Sending late (scheduled against actual) is reported too: a client that cannot keep up would flatter nobody.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks.support.client import Stream

SHARE = 0.9  # of the requests


@dataclass(frozen=True, kw_only=True)
class Slo:
    """The objectives of a request."""

    ttft_s: float
    tpot_s: float
    itl_p99_s: float = 1e9  # of the gaps of one stream

    def met(self, one: Stream) -> bool:
        if one.error or not one.arrivals_s:
            return False
        num_after = len(one.arrivals_s) + one.merged - 1
        tpot_s = (one.arrivals_s[-1] - one.arrivals_s[0]) / num_after if num_after else 0.0
        return one.ttft_s <= self.ttft_s and tpot_s <= self.tpot_s and one.itl_p99_s <= self.itl_p99_s


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What one rate gave."""

    rate: float  # requests/s
    attained: float  # share of the requests
    late_ms: float  # the latest sending
    num_requests: int

    @property
    def holds(self) -> bool:
        return self.attained >= SHARE


async def probe(
    send: Callable[[], Awaitable[Stream]], slo: Slo, rate: float, seconds: float, rng: random.Random
) -> Probe:
    """Send at `rate` for `seconds`, wait for all, and return the share that met `slo`."""
    start_s, due_s, late_s = time.monotonic(), 0.0, 0.0
    tasks: list[asyncio.Task[Stream]] = []
    while (due_s := due_s + rng.expovariate(rate)) < seconds:
        await asyncio.sleep(max(0.0, start_s + due_s - time.monotonic()))
        late_s = max(late_s, time.monotonic() - start_s - due_s)
        tasks.append(asyncio.ensure_future(send()))
    done = await asyncio.gather(*tasks, return_exceptions=True)
    met = sum(isinstance(one, Stream) and slo.met(one) for one in done)
    return Probe(rate=rate, attained=met / len(done) if done else 1.0, late_ms=1e3 * late_s, num_requests=len(done))


async def bracket(
    run: Callable[[float], Awaitable[Probe]], first_rate: float, *, halvings: int, until_s: float
) -> list[Probe]:
    """Return the probes that bracket the goodput: doubled until one fails, halved until one holds, then bisected.

    No probe begins after the monotonic time `until_s`.
    """
    probes = [await run(first_rate)]
    grows = probes[0].holds
    while probes[-1].holds == grows and 0.01 < probes[-1].rate < 1000 and time.monotonic() < until_s:
        probes.append(await run(probes[-1].rate * (2.0 if grows else 0.5)))
    for _ in range(halvings):
        low, high = edges(probes)
        if not low or high is None or time.monotonic() >= until_s:
            break
        probes.append(await run((low + high) / 2))
    return probes


def edges(probes: list[Probe]) -> tuple[float, float | None]:
    """Return (highest rate that held below the lowest that failed, that lowest one or None)."""
    failed = min((probe.rate for probe in probes if not probe.holds), default=None)
    held = [probe.rate for probe in probes if probe.holds and (failed is None or probe.rate < failed)]
    return max(held, default=0.0), failed
