"""Two GPUs of one host: where does 1P1D beat the same two GPUs aggregated, and one alone?

    python benchmarks/gpu/two_gpus.py --shape qwen2.5-7b --parts alone,together --budget-s 300 --out FILE.json

Sets up, measures and prints one JSON document as the last line. FILE is rewritten after every part, so that what was
measured survives a call that is cut off. A call does a stated part: one shape, the arms and parts that are named, and
each part ends when its share of the budget is spent. `--rehearse` runs the same on this machine's CPU with a tiny
model; its figures mean nothing. `--one-gpu` puts all on the first GPU: it shows that each arm works, and what is never
to happen on any hardware (`adaptive` worse than not splitting), not what two GPUs would give.

Arms are data (ARMS): a fleet of two servers, one per GPU, and how a request goes to it.

    single           worker 0 of the plain fleet, straight
    aggregated       both plain workers behind our router, policy local: the fair rival
    chunked          the same with prefill in chunks of 512 tokens: the fair rival where gaps must be short
    tollbridge       prefill on GPU 0, decode on GPU 1, KV over TCP loopback, our router, policy split
    tollbridge-shm, tollbridge-nixl  the same with another medium of ours
    adaptive         the same two workers, policy adaptive: the router prices each request
    adaptive-smooth  the same, by a router that is told of the objective `smooth`: gaps of streams within 25 ms
    tollbridge-local the same two workers, policy local: what the connector costs when nothing is split
    nixl, nixl-push  stock connectors, cuda buffers, UCX_TLS not restricted, our router, policy split

Dummy weights, random token ids, prefix caching off, CUDA graphs at the default. All fleets of a call are up at once if
`--together-on-gpu`, which needs the memory; otherwise one after the other, and arms of different fleets do not
alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that the file runs from anywhere, uninstalled

from benchmarks.gpu import legs
from benchmarks.gpu.goodput import Probe, Slo, bracket, edges, probe
from benchmarks.gpu.measure import LONG_OUTPUT, LONG_TOKENS, Arm, Runner
from benchmarks.gpu.router import start_router
from benchmarks.gpu.servers import CPU, GPU, Pair, Server, Spec, start, stop, wait_healthy
from benchmarks.gpu.shapes import SHAPES, kv_bytes_per_token, make_model
from benchmarks.support.client import Stream, stream
from tollbridge.bench.machine import machine

PARTS = ("alone", "together", "interference", "goodput")
LENGTHS = (512, 2048, 4096, 8192, 16384)
CONCURRENCIES = (1, 4, 8, 16, 32)
READY_ATTEMPTS = 5
TRIED = 'tollbridge_router_link_trials_total{outcome="ok"}'
TRIED_WITHIN_S, AGAIN_WITHIN_S = 30.0, 6.0  # the first may have waited for a connection
NUM_DECISIONS = 20  # kept of each router that prices, the newest
CHUNK = 512  # tokens of prefill in a step of the arm `chunked`
# MLPerf inference, TTFT and TPOT: Llama-3.1-8B server and interactive; Llama-2-70B server and interactive for 32B. Both
# are blind to stalls, which a mean hides: `smooth` is ours, the server's TTFT and the p99 of the gaps of each stream.
SMOOTH = Slo(ttft_s=2.0, tpot_s=0.1, itl_p99_s=0.025)
SMOOTH_32B = Slo(ttft_s=2.0, tpot_s=0.2, itl_p99_s=0.04)
SLOS = {"server": Slo(ttft_s=2.0, tpot_s=0.1), "interactive": Slo(ttft_s=0.5, tpot_s=0.03), "smooth": SMOOTH}
SLOS_32B = {"server": Slo(ttft_s=2.0, tpot_s=0.2), "interactive": Slo(ttft_s=0.45, tpot_s=0.04), "smooth": SMOOTH_32B}

Send = Callable[[list[int], int, Stream], Awaitable[Stream]]


@dataclass(frozen=True, kw_only=True)
class Way:
    """An arm: its fleet, and the policy of the router for its requests; None: straight to worker 0."""

    fleet: str
    policy: str | None = None
    slo: str = ""  # what its router is told of; a router of its own. Empty: nothing, the fleet's router


ARMS = {
    "single": Way(fleet="plain"),
    "aggregated": Way(fleet="plain", policy="local"),
    "chunked": Way(fleet="chunked", policy="local"),
    "tollbridge": Way(fleet="tollbridge", policy="split"),
    "adaptive": Way(fleet="tollbridge", policy="adaptive"),
    "adaptive-smooth": Way(fleet="tollbridge", policy="adaptive", slo="smooth"),
    "tollbridge-local": Way(fleet="tollbridge", policy="local"),
    "tollbridge-shm": Way(fleet="tollbridge-shm", policy="split"),
    "tollbridge-nixl": Way(fleet="tollbridge-nixl", policy="split"),
    "nixl": Way(fleet="nixl", policy="split"),
    "nixl-push": Way(fleet="nixl-push", policy="split"),
}


# What a fleet's servers have between them: the transport of servers.py, and more of our connector's settings.
FLEETS: dict[str, tuple[str | None, dict[str, object]]] = {
    "plain": (None, {}),
    "chunked": (None, {}),
    "tollbridge": ("tollbridge", {"media": "tcp"}),
    "tollbridge-shm": ("tollbridge", {"media": "shm"}),
    "tollbridge-nixl": ("tollbridge", {"media": "nixl"}),
    "nixl": ("nixl-cuda", {}),
    "nixl-push": ("nixl-push", {}),
}


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Two servers, one per GPU, and the URLs of their routers by what these are told of."""

    pair: Pair
    routers: dict[str, str]


def main() -> int:
    options = _options()
    names = options.arms.split(",")
    bench = Bench(options, {name: ARMS[name] for name in names})
    print(json.dumps(asyncio.run(bench.run())), flush=True)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Two GPUs of one host, split against aggregated.")
    parser.add_argument("--shape", default="qwen2.5-7b", choices=sorted(SHAPES))
    parser.add_argument("--arms", default="single,aggregated,tollbridge,nixl", help=f"of {','.join(ARMS)}")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--budget-s", type=float, default=200.0, help="for measuring, after the servers are up")
    parser.add_argument("--intervals", default="0.3,0.75", help="seconds between prefills, interference part")
    parser.add_argument("--steady-s", type=float, default=10.0, help="of each window of the interference part")
    parser.add_argument("--probe-s", type=float, default=8.0, help="of each rate of the goodput part")
    parser.add_argument("--slos", default="server,interactive", help=f"of {','.join(SLOS)}")
    parser.add_argument("--goodput-arms", default="", help="of the goodput part; default: all")
    parser.add_argument("--first-rate", type=float, default=4.0, help="of the goodput part, requests/s")
    parser.add_argument("--max-length", type=int, default=max(LENGTHS))
    parser.add_argument("--max-concurrency", type=int, default=max(CONCURRENCIES))
    parser.add_argument("--kv-gb", type=float, default=12.0, help="KV cache of a server")
    parser.add_argument("--together-on-gpu", action="store_true", help="all fleets up at once")
    parser.add_argument("--gpu-fraction", default="0.3", help="of a GPU's memory, for each server")
    parser.add_argument("--out", type=Path, default=None, help="default: two_gpus.json under $OUT or here")
    parser.add_argument("--logs", type=Path, default=None)
    parser.add_argument("--models", type=Path, default=None, help="keep the model here, for vLLM's compile cache")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with a tiny model")
    parser.add_argument("--one-gpu", action="store_true", help="both servers of a fleet on the first GPU")
    options = parser.parse_args()
    if options.rehearse:
        options.shape = "rehearsal"
    options.out = options.out or Path(os.environ.get("OUT", ".")) / f"two_gpus-{options.shape}.json"
    return options


class Bench:
    """One call."""

    def __init__(self, options: argparse.Namespace, ways: dict[str, Way]) -> None:
        self._options = options
        self._ways = ways
        self._seed = secrets.randbits(32)
        self._rng = random.Random(self._seed)
        self._host = CPU if options.rehearse else GPU
        self._shares_device = options.rehearse or options.one_gpu
        self._results: dict[str, Any] = {
            "shape": options.shape,
            "kv_bytes_per_token": kv_bytes_per_token(options.shape),
            "conditions": {
                **machine(), "gpus": _gpus(), "seed": self._seed, "arms": list(ways),
                "together_on_gpu": options.together_on_gpu, "one_gpu": options.one_gpu,
                "rehearsal": options.rehearse, "repetitions": options.repetitions, "long": [LONG_TOKENS, LONG_OUTPUT],
            },
        }  # fmt: skip

    async def run(self) -> dict[str, Any]:
        """Measure all arms, at once or fleet by fleet, and return the results."""
        fleets = list(dict.fromkeys(way.fleet for way in self._ways.values()))
        groups = [fleets] if self._options.together_on_gpu else [[fleet] for fleet in fleets]
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(self._options.shape, self._options.models or Path(folder))
            for group in groups:
                await self._measure(group, model, Path(folder), self._options.budget_s / len(groups))
        return self._results

    async def _measure(self, names: Sequence[str], model: Path, folder: Path, budget_s: float) -> None:
        begun_s = time.monotonic()
        async with AsyncExitStack() as stack:
            fleets = await self._start(names, model, folder, stack)
            timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
            connector = aiohttp.TCPConnector(limit=0)
            session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=timeout))
            ways = {name: way for name, way in self._ways.items() if way.fleet in fleets}
            told = [url for one in fleets.values() for slo, url in one.routers.items() if slo]
            for url in told:
                self._keep("link_tried", {url: await _tried(session, url)})
            arms = {name: _arm(session, way, fleets[way.fleet], self._decided(name)) for name, way in ways.items()}
            self._keep("started_s", {"+".join(fleets): round(time.monotonic() - begun_s, 1)})
            end_s = time.monotonic() + budget_s
            runner = Runner(await self._warm(arms), self._rng, self._options.repetitions)
            steps = dict(zip(PARTS, (self._alone, self._together, self._interference, self._goodput), strict=True))
            parts = [part for part in PARTS if part in self._options.parts.split(",")]
            for index, part in enumerate(parts):
                now_s = time.monotonic()
                try:
                    await steps[part](runner, now_s + max(5.0, (end_s - now_s) / (len(parts) - index)))
                except (RuntimeError, aiohttp.ClientError, TimeoutError) as error:
                    self._keep("failed", {part: str(error)[:500]})
            for url in told:
                self._keep("last_decisions", {url: await _last_decisions(session, url)})

    async def _warm(self, arms: dict[str, Arm]) -> dict[str, Arm]:
        """Return the arms that serve, warm; the others are noted."""
        warm: dict[str, Arm] = {}
        for name, arm in arms.items():
            runner = Runner({name: arm}, self._rng, 1)
            for attempts_left in reversed(range(READY_ATTEMPTS)):
                try:
                    await runner.warm_up(self._lengths, min(8, self._options.max_concurrency))
                    warm[name] = arm
                    break
                except (RuntimeError, aiohttp.ClientError, TimeoutError) as error:
                    if not attempts_left:
                        self._keep("failed", {name: str(error)[:500]})
                    await asyncio.sleep(1)  # the router may not have seen its workers yet
        return warm

    async def _start(self, names: Sequence[str], model: Path, folder: Path, stack: AsyncExitStack) -> dict[str, Fleet]:
        logs = self._options.logs or folder
        logs.mkdir(parents=True, exist_ok=True)
        started: list[Server] = []
        stack.callback(stop, started)
        pairs = {}
        for name in names:
            both = [start(self._spec(name, role, gpu, model), logs, self._host) for gpu, role in enumerate("pd")]
            started += both
            pairs[name] = Pair(name, *both)
        errors = await asyncio.gather(
            *(wait_healthy([pair.prefill, pair.decode]) for pair in pairs.values()), return_exceptions=True
        )
        for name, error in zip(pairs, errors, strict=True):
            if error is not None:
                self._keep("failed", {name: str(error)[-1500:]})
        healthy = [pair for pair, error in zip(pairs.values(), errors, strict=True) if error is None]
        return {pair.transport: self._fleet(pair, folder, stack) for pair in healthy}

    def _fleet(self, pair: Pair, folder: Path, stack: AsyncExitStack) -> Fleet:
        aggregated = pair.transport in ("plain", "chunked")
        prefer = {} if aggregated else {"p": "prefill", "d": "decode"}
        connector = pair.transport if pair.transport in ("nixl", "nixl-push") else "tollbridge"
        urls = {}
        for told in sorted({way.slo for way in self._ways.values() if way.policy and way.fleet == pair.transport}):
            router = start_router(
                {"p": pair.prefill, "d": pair.decode}, folder, prefer=prefer, connector=connector,
                slo=asdict(self._presets[told]) if told else {},
            )  # fmt: skip
            stack.callback(router.stop)
            urls[told] = router.url
        return Fleet(pair=pair, routers=urls)

    @property
    def _presets(self) -> dict[str, Slo]:
        return SLOS_32B if "32b" in self._options.shape else SLOS

    def _spec(self, fleet: str, role: str, gpu: int, model: Path) -> Spec:
        args = ["--max-model-len", str(max(8192, self._options.max_length + 1024))]
        if not self._options.rehearse:
            args += ["--kv-cache-memory-bytes", str(int(self._options.kv_gb * 1e9))]
            args += ["--gpu-memory-utilization", self._options.gpu_fraction]
        if fleet == "chunked":
            args += ["--max-num-batched-tokens", str(CHUNK)]
        transport, connector = FLEETS[fleet]
        return Spec(
            name=f"{fleet}-{role}", model=model, transport=transport, connector=connector, args=args,
            gpus="" if self._shares_device else f"{gpu},{1 - gpu}",  # the other is seen, for NIXL's sake
        )  # fmt: skip

    # ── parts: each adds repetitions until its time is up, at least one ──

    @property
    def _lengths(self) -> list[int]:
        return [length for length in LENGTHS if length <= self._options.max_length]

    async def _alone(self, runner: Runner, until_s: float) -> None:
        for repetition in range(self._options.repetitions):
            if repetition and time.monotonic() > until_s:
                return
            for arm, by_length in (await runner.alone(self._lengths, 1)).items():
                for length, times in by_length.items():
                    self._extend("alone_ttft_ms", arm, length, times)
            self._write()

    async def _together(self, runner: Runner, until_s: float) -> None:
        for repetition in range(self._options.repetitions):
            for count in (count for count in CONCURRENCIES if count <= self._options.max_concurrency):
                if repetition and time.monotonic() > until_s:
                    return
                for arm, figures in (await runner.together(count, 1)).items():
                    for name, values in figures.items():
                        self._extend("together", arm, f"{count}.{name}", values)
                self._write()

    async def _interference(self, runner: Runner, until_s: float) -> None:
        for index, interval_s in enumerate(map(float, self._options.intervals.split(","))):
            if index and time.monotonic() > until_s:
                return
            for arm in runner.arms:
                figures = await runner.steady_one(arm, self._options.steady_s, interval_s)
                self._results.setdefault("interference", {}).setdefault(arm, {})[f"{interval_s}s"] = figures
                self._write()

    async def _goodput(self, runner: Runner, until_s: float) -> None:
        slos = {name: self._presets[name] for name in self._options.slos.split(",")}
        wanted = self._options.goodput_arms.split(",") if self._options.goodput_arms else list(runner.arms)
        shares = [(name, arm) for name in slos for arm in runner.arms if arm in wanted]
        for index, (name, arm) in enumerate(shares):
            now_s = time.monotonic()
            probes = await bracket(
                partial(self._probe, runner, arm, slos[name]),
                self._options.first_rate,
                halvings=3,
                until_s=now_s + (until_s - now_s) / (len(shares) - index),
            )
            held, failed = edges(probes)
            found = {"holds_at": held, "fails_at": failed, "probes": [asdict(one) for one in probes]}
            self._results.setdefault("goodput", {}).setdefault(name, {})[arm] = found
            self._write()

    async def _probe(self, runner: Runner, arm: str, slo: Slo, rate: float) -> Probe:
        send = partial(runner.send, arm, LONG_TOKENS, LONG_OUTPUT)
        return await probe(send, slo, rate, self._options.probe_s, self._rng)

    # ── results ──

    def _decided(self, arm: str) -> Counter[str]:
        """Return where to count what the router chose for `arm`: a split that does not happen must be seen."""
        counts: Counter[str] = self._results.setdefault("decided", {}).setdefault(arm, Counter())
        return counts

    def _extend(self, part: str, arm: str, key: str, values: Sequence[float]) -> None:
        self._results.setdefault(part, {}).setdefault(arm, {}).setdefault(key, []).extend(values)

    def _keep(self, part: str, figures: dict[str, Any]) -> None:
        self._results.setdefault(part, {}).update(figures)
        self._write()

    def _write(self) -> None:
        self._options.out.write_text(json.dumps(self._results))


def _arm(session: aiohttp.ClientSession, way: Way, fleet: Fleet, decided: Counter[str]) -> Arm:
    """Return how requests go, steady streams alike; `decided` counts what the router chose."""
    if way.policy is None:
        return _alike(lambda prompt, n, into: legs.single(session, fleet.pair.prefill, prompt, n, into))
    url, policy = fleet.routers[way.slo], way.policy

    async def routed(prompt: list[int], max_tokens: int, into: Stream) -> Stream:
        await stream(session, url, legs.body(prompt, max_tokens), policy=policy, into=into)
        decided[f"{into.decision.get('choice')} ({into.decision.get('reason')})"] += 1
        return into

    return _alike(routed)


async def _tried(session: aiohttp.ClientSession, url: str) -> bool:
    """Return whether the router has tried its link before long: what it does not know of a link it would not use."""
    for _ in range(int(TRIED_WITHIN_S)):
        async with session.get(url + "/metrics") as response:
            text = await response.text()
        if any(line.startswith(TRIED) and float(line.split()[-1]) >= 1 for line in text.splitlines()):
            await asyncio.sleep(AGAIN_WITHIN_S)
            return True
        await asyncio.sleep(1)
    return False


async def _last_decisions(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url + "/decisions", params={"limit": NUM_DECISIONS}) as response:
        return await response.json()


def _gpus() -> list[str]:
    """Return the names of this machine's GPUs."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def _alike(send: Send) -> Arm:
    return Arm(send=send, steady=send)


if __name__ == "__main__":
    sys.exit(main())
