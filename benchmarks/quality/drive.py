"""Runs windows against a stack on two hosts. Started by the claim inside of host a's network namespace.

One JSON line per request and one per window go to the output file; a window that is in it already is not run again.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.quality import cells
from benchmarks.quality.cells import Cell, Request
from benchmarks.support.client import Stream, stream
from tollbridge.bench.fleet import Fleet, running
from tollbridge.bench.netns import ADDRESSES, Link

DRAIN_S = 25.0  # a request that has not ended so long after the window is a miss, and is cut off
WARM_LENGTHS = (64, 256, 640)


@dataclass(frozen=True)
class Plan:
    """What one start of the stack is to run."""

    link: str  # name of the namespaces' link
    cells: list[str]
    arms: list[str]
    blocks: list[int]
    window_s: float
    out: str
    deadline_s: float  # no window begins later than so long after the start


def main() -> None:
    plan = Plan(**json.loads(sys.argv[1]))
    asyncio.run(_run(plan))


async def _run(plan: Plan) -> None:
    start_s = time.monotonic()
    book = Book(Path(plan.out))
    link = Link(plan.link)
    made = workers()
    if book.speed is None:
        async with stack(made, link, {}) as (fleet, session):
            book.calibrated(await Bench(fleet, session, book, cells.Speed(0.0, 0.0)).calibrate())
    assert book.speed is not None
    ttft_s, tpot_s, itl_p99_s = book.speed.slo
    slo: dict[str, object] = {"ttft_s": ttft_s, "tpot_s": tpot_s, "itl_p99_s": itl_p99_s}
    async with stack(made, link, slo) as (fleet, session):
        bench = Bench(fleet, session, book, book.speed)
        for name in plan.cells:
            cell = cells.find(name)
            missing = [(b, a) for b in plan.blocks for a in cells.order(tuple(plan.arms), b, cell)]
            missing = [each for each in missing if (name, *each) not in book.done]
            if not missing:
                continue
            link.shape(cells.LINKS[cell.link], burst="32kb", latency="100ms")
            await bench.warm()
            for block, arm in missing:
                if time.monotonic() - start_s > plan.deadline_s:
                    return
                await bench.window(cell, block, arm, plan.window_s)


@asynccontextmanager
async def stack(
    given: list[dict[str, object]], link: Link, slo: dict[str, object]
) -> AsyncIterator[tuple[Fleet, aiohttp.ClientSession]]:
    """Start workers and router, d0 on host b."""
    more = {"dtype": "float32", "router": {"port": 0, "host": "127.0.0.1", "policy": "adaptive"}, "slo": slo}
    async with (
        running(
            model="smollm2",
            workers=given,
            router_cores=None,
            engine={"kv_cache_mib": 512, "threads": 1},
            more=more,
            prefixes={"d0": link.command("b", [])},
        ) as fleet,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_read=120)) as session,
    ):
        yield fleet, session


def workers() -> list[dict[str, object]]:
    """Return one worker on each host, as the cluster file writes them."""
    return [_worker("p0", "prefill", "a", 0), _worker("d0", "decode", "b", 1)]


def _worker(name: str, prefer: str, host: str, core: int) -> dict[str, object]:
    address = ADDRESSES[host]
    return {
        "name": name, "prefer": prefer, "cores": [core], "host": f"node-{host}",
        "url": f"http://{address}:0", "kv": f"{address}:0", "events": f"tcp://{address}:0",
    }  # fmt: skip


class Book:
    """The output file: what has been run, and what comes."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [json.loads(line) for line in lines]
        self.done = {(w["cell"], w["block"], w["arm"]) for w in kept if w["kind"] == "window"}
        speeds = [cells.Speed(r["token_s"], r["step_s"]) for r in kept if r["kind"] == "calibration"]
        self.speed = speeds[0] if speeds else None

    def calibrated(self, speed: cells.Speed) -> None:
        """Keep what the engines take, for all windows of this file."""
        self.speed = speed
        self.write([{"kind": "calibration", "token_s": speed.token_s, "step_s": speed.step_s, "slo": speed.slo}])

    def write(self, records: list[dict[str, Any]]) -> None:
        """Append the requests of one window, then the window: all or nothing counts."""
        with self._path.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


class Bench:
    """Load generator over one stack."""

    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession, book: Book, speed: cells.Speed) -> None:
        self._fleet, self._session, self._book, self._speed = fleet, session, book, speed
        self._rng = np.random.default_rng(cells.SEED)

    async def calibrate(self) -> cells.Speed:
        """Measure what a prompt token and a step of four streams take on each engine; the slower one counts."""
        tokens, steps = [], []
        for name in ("p0", "d0"):
            url = self._fleet.url(name)
            await self.ask(url, 64, 2)
            alone = [(await self.ask(url, 512, 2)).ttft_s for _ in range(2)]
            tokens.append(min(alone) / 512)
            four = await asyncio.gather(*(self.ask(url, 16, 24) for _ in range(4)))
            steps.append(statistics.median(gap for each in four for gap in each.gaps_s()))
        speed = cells.Speed(max(tokens), max(steps))
        print(f"{1 / speed.token_s:.0f} prompt tokens/s, a step of four in {1e3 * speed.step_s:.0f} ms", flush=True)
        return speed

    async def warm(self) -> None:
        """Let the router learn the engines and the link as they are now: a few requests by either way, unmeasured."""
        url = self._fleet.url("router")
        for num_tokens in WARM_LENGTHS:
            for policy in ("local", "local", "split"):
                await self.ask(url, num_tokens if policy == "local" else min(num_tokens, 256), 10, policy=policy)

    async def window(self, cell: Cell, block: int, arm: str, window_s: float) -> None:
        rate = cells.arrival_rate(cell, self._speed)
        arrivals = cells.traffic(cell, block, arm, rate_per_s=rate, window_s=window_s)
        start_s = time.monotonic() + 0.2
        results = [Stream() for _ in arrivals]
        tasks = [
            asyncio.create_task(self._arrive(start_s, request, result, arm))
            for request, result in zip(arrivals, results, strict=True)
        ]
        if tasks:
            await asyncio.wait(tasks, timeout=window_s + DRAIN_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        about = {"cell": cell.name, "block": block, "arm": arm, "slo": self._speed.slo}
        records = [
            {"kind": "request", **about, **_record(request, result, start_s)}
            for request, result in zip(arrivals, results, strict=True)
        ]
        cost = await self._learnt()
        window = {
            "kind": "window", **about, "window_s": window_s, "rate_per_s": rate, "token_s": self._speed.token_s,
            "step_s": self._speed.step_s, "took_s": time.monotonic() - start_s, "cost": cost,
        }  # fmt: skip
        self._book.write([*records, window])
        good = sum(1 for r in records if not r["error"])
        print(f"{cell.name} block {block} {arm}: {good} of {len(records)} answered", flush=True)

    async def _arrive(self, start_s: float, request: Request, into: Stream, arm: str) -> None:
        await asyncio.sleep(max(0.0, start_s + request.at_s - time.monotonic()))
        body = _body(request.prompt, request.max_tokens)
        try:
            await stream(self._session, self._fleet.url("router"), body, policy=arm, into=into)
        except aiohttp.ClientError as error:
            into.error = str(error) or type(error).__name__

    def prompt(self, num_tokens: int) -> list[int]:
        """Draw a prompt that no cache has seen."""
        return [int(t) for t in self._rng.integers(*cells.VOCABULARY, size=num_tokens)]

    async def ask(self, url: str, num_tokens: int, max_tokens: int, *, policy: str | None = None) -> Stream:
        """Send a new prompt."""
        return await self.send(url, self.prompt(num_tokens), max_tokens, policy=policy)

    async def send(self, url: str, prompt: list[int], max_tokens: int, *, policy: str | None = None) -> Stream:
        return await stream(self._session, url, _body(prompt, max_tokens), policy=policy)

    async def _learnt(self) -> Any:
        async with self._session.get(self._fleet.url("router") + "/fleet") as response:
            return (await response.json()).get("cost")


def _body(prompt: list[int], max_tokens: int) -> dict[str, object]:
    return {
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip


def _record(request: Request, result: Stream, start_s: float) -> dict[str, Any]:
    gaps = result.gaps_s()
    num_tokens = len(result.arrivals_s) + result.merged
    cut_off = "" if num_tokens >= request.max_tokens else "It did not end in time."
    decision = result.decision
    predicted = decision.get("predicted")
    return {
        "at_s": request.at_s,
        "lag_s": result.sent_s - start_s - request.at_s,
        "prompt_tokens": len(request.prompt),
        "num_tokens": num_tokens,
        "ttft_s": result.ttft_s if result.arrivals_s else None,
        "tpot_s": sum(gaps) / (num_tokens - 1) if num_tokens > 1 else None,
        "itl_p99_s": float(np.percentile(gaps, 99)) if gaps else None,
        "gaps_s": [round(gap, 4) for gap in gaps],
        "error": result.error or cut_off,
        "choice": decision.get("choice"),
        "reason": decision.get("reason"),
        "prefill": decision.get("prefill"),
        "decode": decision.get("decode"),
        "predicted": predicted if isinstance(predicted, dict) else {},
    }


def plan_json(plan: Plan) -> str:
    return json.dumps(asdict(plan))


if __name__ == "__main__":
    main()
