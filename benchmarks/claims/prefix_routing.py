"""Does the router send a prompt where its prefix is cached? KV-aware routing against round robin and least-loaded.

Four embedded workers on two cores, each with room for about three of the shared prefixes; requests are a prefix drawn
at random among 2, 7, 12 or 24 kinds and a tail of their own, 4 or 8 at a time. Every policy gets the same sequence
(prefixes differ in each cell, so nothing is left over). The cached-token ratio is what the *workers* count: prompt
tokens found in their prefix caches, over prompt tokens looked up.

The claim holds when KV-aware routing has at least twice round robin's ratio wherever the kinds exceed one worker (7, 12
and 24), and no less than round robin's where they do not (2).
"""

from __future__ import annotations

import asyncio
import random
import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from benchmarks.support.client import Stream, stream
from benchmarks.support.metrics import scrape
from benchmarks.support.result import ClaimResult, Table
from tollbridge.bench.fleet import Fleet, running

DESCRIPTION = "share of prompt tokens found in caches: KV-aware routing against round robin and least-loaded"

NUM_WORKERS = 4
KINDS = (2, 7, 12, 24)
CONCURRENCIES = (4, 8)
POLICIES = ("round-robin", "least-loaded", "dynamo-kv", "kv-aware")
PREFIXES_PER_WORKER = 3
TAIL_TOKENS = 16
REQUESTS_PER_KIND = 10  # so that what each kind costs at first, with any policy, does not hide what follows
MIN_REQUESTS = 80
OUTPUT_TOKENS = 4
KV_CACHE_MIB = 1  # 1,024 tokens of the tiny model
MIN_RATIO = 2.0
VOCABULARY = (4, 255)  # ids to draw prompts from


@dataclass(frozen=True)
class Cell:
    kinds: int
    concurrency: int


def run(quick: bool) -> ClaimResult:
    """Measure, and return the claim's verdict."""
    cells = [Cell(kinds, concurrency) for kinds in KINDS for concurrency in CONCURRENCIES]
    from tollbridge.engine.tiny import make_tiny_model  # torch: not for `--list`

    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "tiny")
        return asyncio.run(_measure([Cell(12, 4)] if quick else cells, str(model)))


async def _measure(cells: Sequence[Cell], model: str) -> ClaimResult:
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    names = [f"w{number}" for number in range(NUM_WORKERS)]
    workers: list[dict[str, object]] = [{"name": name, "cores": [at % 2]} for at, name in enumerate(names)]
    engine: dict[str, object] = {"kv_cache_mib": KV_CACHE_MIB, "threads": 1}
    outcomes: dict[Cell, dict[str, float]] = {}
    async with (
        running(model=model, workers=workers, router_cores=None, engine=engine) as fleet,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_read=120)) as session,
    ):
        bench = Bench(fleet, session, names, await _prefix_tokens(session, fleet.url(names[0])))
        for at, cell in enumerate(cells):
            draws = [rng.randrange(cell.kinds) for _ in range(max(MIN_REQUESTS, REQUESTS_PER_KIND * cell.kinds))]
            order = POLICIES[at % 4 :] + POLICIES[: at % 4]
            outcomes[cell] = {policy: await bench.cell(cell, policy, draws, rng) for policy in order}
        router = await scrape(session, fleet.url("router"))
    return _verdict(outcomes, bench.prefix_tokens, seed, router)


async def _prefix_tokens(session: aiohttp.ClientSession, url: str) -> int:
    """Return how long a prefix is, in whole blocks, for a worker to have room for three and what runs beside them."""
    async with session.get(url + "/tollbridge/status") as response:
        status = await response.json()
    room = status["engine"]["num_blocks"] * status["block_size"]
    return int(room // (PREFIXES_PER_WORKER + 1) // status["block_size"] * status["block_size"])


@dataclass
class Bench:
    """The load generator."""

    fleet: Fleet
    session: aiohttp.ClientSession
    names: list[str]
    prefix_tokens: int

    async def cell(self, cell: Cell, policy: str, draws: list[int], rng: random.Random) -> float:
        """Send one request per draw, `cell.concurrency` at a time; return the ratio by the workers' counters."""
        prefixes = [self.tokens(rng, self.prefix_tokens) for _ in range(cell.kinds)]
        bodies = [self.body(prefixes[kind] + self.tokens(rng, TAIL_TOKENS)) for kind in draws]
        before = await self.counters()
        await self.send(bodies, policy, cell.concurrency)
        hits, queries = (after - b for after, b in zip(await self.counters(), before, strict=True))
        return hits / queries

    @staticmethod
    def tokens(rng: random.Random, number: int) -> list[int]:
        return [rng.randint(*VOCABULARY) for _ in range(number)]

    @staticmethod
    def body(prompt: list[int]) -> dict[str, object]:
        return {
            "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip

    async def send(self, bodies: list[dict[str, object]], policy: str, concurrency: int) -> None:
        """Send all bodies, taken in order by `concurrency` clients; RuntimeError when one fails."""
        queue = iter(bodies)
        done: list[Stream] = []

        async def client() -> None:
            for body in queue:
                one = await stream(self.session, self.fleet.url("router"), body, policy=policy)
                done.append(one)

        async with asyncio.TaskGroup() as clients:
            for _ in range(concurrency):
                clients.create_task(client())
        errors = [each.error for each in done if each.error]
        if errors:
            raise RuntimeError(f"{policy}: {errors[0]}")

    async def counters(self) -> tuple[float, float]:
        """Return the prompt tokens found in prefix caches and those looked up, of all workers."""
        scrapes = [await scrape(self.session, self.fleet.url(name)) for name in self.names]
        names = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
        hits, queries = (sum(each[name] for each in scrapes) for name in names)
        return hits, queries


def _verdict(
    outcomes: dict[Cell, dict[str, float]], prefix_tokens: int, seed: int, router: dict[str, float]
) -> ClaimResult:
    figures: dict[str, float | dict[str, float]] = {}
    bounds: dict[str, str] = {}
    rows = []
    holds = True
    for cell, by_policy in outcomes.items():
        name = f"{cell.kinds} kinds, {cell.concurrency} at once"
        aware, blind = by_policy["kv-aware"], by_policy["round-robin"]
        ratio = aware / blind if blind else float("inf")
        bound = MIN_RATIO if cell.kinds > PREFIXES_PER_WORKER else 1.0
        holds = holds and ratio >= bound
        bounds[f"{name}: kv-aware over round-robin"] = f">= {bound:g}"
        figures[name] = by_policy | {"kv_aware_over_round_robin": ratio}
        rows.append([name, *(f"{by_policy[policy]:.3f}" for policy in POLICIES), f"{ratio:.2f}"])
    prefix = "tollbridge_router_cached_prompt_tokens_"
    figures["promised_over_found"] = router[f"{prefix}predicted_total"] / router[f"{prefix}real_total"]
    return ClaimResult(
        holds=holds,
        figures=figures,
        bounds=bounds,
        conditions={
            "model": "tiny: a random Llama of two layers; what is cached does not depend on the weights",
            "workers": f"{NUM_WORKERS} embedded, two per core, room for {PREFIXES_PER_WORKER} prefixes and what runs",
            "prefix_tokens": prefix_tokens,
            "tail_tokens": TAIL_TOKENS,
            "requests_per_cell": f"{REQUESTS_PER_KIND} per kind, at least {MIN_REQUESTS}",
            "seed": seed,
            "definitions": "cached: prompt tokens found in the workers' prefix caches over those looked up",
        },
        table=Table(
            title="Share of prompt tokens found in a cache",
            columns=["cell", *POLICIES, "kv-aware over round-robin"],
            rows=rows,
        ),
    )
