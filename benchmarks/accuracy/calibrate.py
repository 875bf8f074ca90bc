"""Measures what the simulator needs to know, on a stack that is not loaded. Started inside host a's network namespace.

Nothing of what is measured here is judged later, and nothing that is judged is fitted here.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.quality import cells, drive
from benchmarks.support.client import Stream
from tollbridge.bench.fleet import Fleet
from tollbridge.bench.netns import Link

LENGTHS, QUICK_LENGTHS = (24, 48, 96, 192, 384, 512, 704, 896), (24, 96, 384, 640)
STREAMS, QUICK_STREAMS = (1, 2, 4, 6), (1, 4)
REPETITIONS = 3  # a smoke test takes one
SPLIT_TOKENS = {"10": 64, "30": 128, "60": 256, "200": 512, "free": 640}  # about a second or two of wire
SHORT_TOKENS = 24  # of a split that shows what a split takes beside prefill and wire
BESIDE_TOKENS = 512
SENDING_TOKENS = 896


@dataclass(frozen=True)
class Measured:
    """Raw measurements; `benchmarks/accuracy/predict.py` fits them."""

    token_s: float  # as decide-quality's SLO and rates have it
    step_s: float
    prefills: list[tuple[int, float]]  # (tokens, seconds that the worker reports)
    overheads_s: list[float]  # of local requests: TTFT at the client beyond queue and prefill
    steps: list[tuple[int, float]]  # (streams, median gap)
    goodputs: dict[str, float]  # by link, bytes/s
    splits: dict[str, list[tuple[int, float]]]  # by link: (tokens, TTFT at the client) of a split alone
    sending: list[tuple[float, float, float]]  # on the last link: (bytes/s of it, prefill alone, while its KV leaves)
    slower_beside: float  # what both engines take at once / one alone: two cores of one machine are not two machines


def main() -> None:
    link, names, out, quick = sys.argv[1], sys.argv[2].split(","), Path(sys.argv[3]), sys.argv[4] == "quick"
    measured = asyncio.run(measure(Link(link), names, quick=quick))
    out.write_text(json.dumps(asdict(measured), indent=1) + "\n")


async def measure(link: Link, names: list[str], *, quick: bool = False) -> Measured:
    """Return the measurements, the links called `names` among them."""
    async with drive.stack(drive.workers(), link, {}) as (fleet, session):
        book = drive.Book(Path("/dev/null"))
        bench = drive.Bench(fleet, session, book, cells.Speed(0.0, 0.0))
        meter = _Meter(fleet, session, bench, quick)
        speed = await bench.calibrate()
        prefills, overheads = await meter.prefills()
        steps = await meter.steps()
        goodputs, splits = {}, {}
        for name in names:
            link.shape(cells.LINKS[name], burst="32kb", latency="100ms")
            goodputs[name], splits[name] = await meter.link(SPLIT_TOKENS[name])
        sending = await meter.sending(goodputs[names[-1]])
        beside = await meter.beside()
        return Measured(speed.token_s, speed.step_s, prefills, overheads, steps, goodputs, splits, sending, beside)


class _Meter:
    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession, bench: drive.Bench, quick: bool) -> None:
        self._fleet, self._session, self._bench = fleet, session, bench
        self._lengths = QUICK_LENGTHS if quick else LENGTHS
        self._streams = QUICK_STREAMS if quick else STREAMS
        self._repetitions = 1 if quick else REPETITIONS

    async def prefills(self) -> tuple[list[tuple[int, float]], list[float]]:
        found, overheads = [], []
        for num_tokens in self._lengths:
            for _ in range(2 * self._repetitions):  # both engines, in turn
                result = await self._bench.ask(self._fleet.url("router"), num_tokens, 2, policy="local")
                report = (await self._happened(result))["decode_report"]
                found.append((num_tokens, float(report["prefill_s"])))
                overheads.append(result.ttft_s - report["prefill_s"] - report.get("queue_s", 0.0))
        return found, overheads

    async def steps(self) -> list[tuple[int, float]]:
        found = []
        for name in ("p0", "d0"):
            for number in self._streams:
                url = self._fleet.url(name)
                each = await asyncio.gather(*(self._bench.ask(url, 16, 40) for _ in range(number)))
                gaps = [gap for result in each for gap in result.gaps_s()[8:]]
                found.append((number, statistics.median(gaps)))
        return found

    async def beside(self) -> float:
        """Return how much longer a prefill takes while the other engine computes one, too."""
        urls = [self._fleet.url(name) for name in ("p0", "d0")]
        alone, both = [], []
        for _ in range(2 * self._repetitions):
            alone += [(await self._bench.ask(url, BESIDE_TOKENS, 2)).ttft_s for url in urls]
            both += [
                each.ttft_s for each in await asyncio.gather(*(self._bench.ask(url, BESIDE_TOKENS, 2) for url in urls))
            ]
        return statistics.median(both) / statistics.median(alone)

    async def sending(self, goodput_bytes_per_s: float) -> list[tuple[float, float, float]]:
        """Return what a prefill takes alone and while its KV leaves, in turn: the I/O process shares the core."""
        found = []
        for _ in range(2 * self._repetitions - 1):
            alone = await self._bench.ask(self._fleet.url("p0"), SENDING_TOKENS, 2)
            split = await self._bench.ask(self._fleet.url("router"), SENDING_TOKENS, 2, policy="split")
            with_s = float((await self._happened(split))["prefill_report"]["prefill_s"])
            found.append((goodput_bytes_per_s, alone.ttft_s, with_s))
        return found

    async def link(self, num_tokens: int) -> tuple[float, list[tuple[int, float]]]:
        """Return the goodput, from KV that prefill has cached, and the TTFT of short splits."""
        rates, splits = [], []
        for _ in range(self._repetitions):
            cold = await self._bench.ask(self._fleet.url("router"), SHORT_TOKENS, 4, policy="split")
            splits.append((SHORT_TOKENS, cold.ttft_s))
            prompt = self._bench.prompt(num_tokens)
            await self._bench.send(self._fleet.url("p0"), prompt, 1)
            warm = await self._bench.send(self._fleet.url("router"), prompt, 4, policy="split")
            transfer = (await self._happened(warm))["decode_report"]["transfer"]
            rates.append(transfer["payload_bytes"] / transfer["wire_s"])
        return statistics.median(rates), splits

    async def _happened(self, result: Stream) -> Any:
        url = f"{self._fleet.url('router')}/decisions/{result.decision['id']}"
        async with self._session.get(url) as response:
            return (await response.json())["happened"]


if __name__ == "__main__":
    main()
