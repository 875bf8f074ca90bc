"""vLLM on one GPU, two servers: a split by Tollbridge and by NIXL against one of the servers alone.

Dummy weights, prefix caching off, prompts of random token ids, legs sent by the benchmark itself, loopback TCP. All
servers of a model are up at once and arms alternate within each repetition. Two servers share one GPU: while one
prefills, the other's decode steps are time-sliced with it, which no transport can mend.

Environment: VLLM_GPU_SHAPES (comma-separated, default Qwen2.5-7B and Qwen3-0.6B), VLLM_GPU_TRANSPORTS
(tollbridge,nixl-cuda,nixl-push; tollbridge-threads and tollbridge-process
choose who does the I/O), VLLM_GPU_LOGS (a folder for the servers' logs).
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.gpu import legs
from benchmarks.gpu.ceiling import ceiling_ms
from benchmarks.gpu.measure import LENGTHS, Arm, Runner
from benchmarks.gpu.servers import Pair, Server, Spec, start, stop, wait_healthy
from benchmarks.gpu.shapes import kv_bytes_per_token, make_model
from benchmarks.support.client import Stream
from benchmarks.support.result import ClaimResult, Table

DESCRIPTION = "vLLM on a GPU: TTFT, ITL and throughput of a split against one server alone, beside NIXL (needs a GPU)"

DEFAULT_SHAPES = "qwen2.5-7b,qwen3-0.6b"
MAX_TTFT_RATIO = 1.5
MIN_TOKENS_RATIO = 0.8
MIN_TOKENS_OVER_NIXL = 8  # of Qwen3-0.6B, which the socket limits and not prefill
MAX_TOLL_RATIO = 1.5  # TTFT over single's, to what plain sockets take for the same bytes
VARIANTS = {"tollbridge-threads": {"io": "threads"}, "tollbridge-process": {"io": "process"}}
STEADY_S, STEADY_INTERVAL_S = 12.0, 0.75
SERVER_ARGS = ["--kv-cache-memory-bytes", "6000000000", "--gpu-memory-utilization", "0.2", "--max-model-len", "8192"]


def run(quick: bool) -> ClaimResult:
    """Measure every shape, and judge Qwen2.5-7B's bounds."""
    shapes = os.environ.get("VLLM_GPU_SHAPES", DEFAULT_SHAPES).split(",")
    transports = os.environ.get("VLLM_GPU_TRANSPORTS", "tollbridge,nixl-cuda,nixl-push").split(",")
    seed = secrets.randbits(32)
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(os.environ.get("VLLM_GPU_LOGS", folder))
        logs.mkdir(parents=True, exist_ok=True)
        figures = {
            shape: asyncio.run(_shape(shape, transports, Path(folder), logs, random.Random(seed), 3 if quick else 7))
            for shape in shapes
        }
    return _verdict(figures, transports, seed)


async def _shape(
    shape: str, transports: list[str], folder: Path, logs: Path, rng: random.Random, repetitions: int
) -> dict[str, Any]:
    model = make_model(shape, folder)
    sockets_ms = await asyncio.to_thread(ceiling_ms, shape)  # while nothing else runs
    servers: list[Server] = []
    try:
        pairs = {}
        for transport in transports:
            both = [start(_spec(shape, model, transport, role), logs) for role in ("prefill", "decode")]
            servers += both
            pairs[transport] = Pair(transport, *both)
        await wait_healthy(servers)
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_read=60)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            runner = Runner(_arms(session, pairs), rng, repetitions)
            await runner.warm_up()
            await asyncio.sleep(1)  # metrics are told after the step
            ours = [pair for pair in pairs.values() if pair.is_ours]
            for pair in ours:
                await legs.verified_splits(session, pair)
            idle = {server.name: server.rss_bytes() for server in servers}
            figures: dict[str, Any] = {
                "kv_bytes_per_token": kv_bytes_per_token(shape),
                "alone_ttft_ms": await runner.alone(),
                "together": await runner.together(),
                "steady": await runner.steady(STEADY_S, STEADY_INTERVAL_S),
                "ceiling_ms": sockets_ms,
                "verified_splits": {pair.transport: await legs.verified_splits(session, pair) for pair in ours},
            }
            figures["rss_above_idle_mib"] = {s.name: (s.rss_bytes() - idle[s.name]) / 2**20 for s in servers}
            return figures
    finally:
        stop(servers)


def _arms(session: aiohttp.ClientSession, pairs: dict[str, Pair]) -> dict[str, Arm]:
    """Return "single", the decode server of the first pair alone, and the pairs.

    Steady streams decode where their arm decodes; their own prompts are short and served there.
    """

    def alone(server: Server) -> Callable[[list[int], int, Stream], Awaitable[Stream]]:
        return lambda prompt, n, into: legs.single(session, server, prompt, n, into)

    def split(pair: Pair) -> Callable[[list[int], int, Stream], Awaitable[Stream]]:
        return lambda prompt, n, into: legs.split(session, pair, prompt, n, into)

    first = alone(next(iter(pairs.values())).decode)
    arms = {"single": Arm(send=first, steady=first)}
    return arms | {name: Arm(send=split(pair), steady=alone(pair.decode)) for name, pair in pairs.items()}


def _spec(shape: str, model: Path, transport: str, role: str) -> Spec:
    return Spec(
        name=f"{shape}-{transport}-{role}", model=model,
        transport="tollbridge" if transport in VARIANTS else transport, args=SERVER_ARGS,
        connector={"media": "tcp", **VARIANTS.get(transport, {})},
        environ={"UCX_TLS": "tcp,self,cuda_copy"},
    )  # fmt: skip


def _verdict(figures: dict[str, dict[str, Any]], transports: list[str], seed: int) -> ClaimResult:
    summary = {
        shape: {arm: _summary(found, arm) for arm in ("single", *transports)} for shape, found in figures.items()
    }
    bounds: dict[str, str] = {}
    verdicts: list[bool] = []
    if "tollbridge" in transports:
        if "qwen2.5-7b" in summary:
            verdicts += _judge_7b(summary["qwen2.5-7b"], bounds)
        if "qwen3-0.6b" in summary:
            verdicts += _judge_06b(summary["qwen3-0.6b"], figures["qwen3-0.6b"]["ceiling_ms"], bounds)
    columns = ["model", "arm", *next(iter(summary[next(iter(summary))].values()))]
    rows = [
        [shape, arm, *(f"{value:.1f}" for value in one.values())]
        for shape, arms in summary.items()
        for arm, one in arms.items()
    ]
    return ClaimResult(
        holds=bool(verdicts) and all(verdicts),
        figures={"summary": summary, "raw": figures},
        bounds=bounds,
        conditions={"seed": seed, "transports": transports, "steady_s": STEADY_S, "interval_s": STEADY_INTERVAL_S,
                    "servers": "two per transport, all on one GPU, CUDA graphs at the default"},
        table=Table(title="one GPU, two vLLM servers", columns=columns, rows=rows),
    )  # fmt: skip


def _judge_7b(arms: dict[str, dict[str, float]], bounds: dict[str, str]) -> list[bool]:
    """Bounds of a model that prefill limits."""
    mine, single = arms["tollbridge"], arms["single"]
    limits = {
        **{f"ttft_{n}_ms": MAX_TTFT_RATIO for n in (2048, 4096)},
        "together_ttft_p50_ms": MAX_TTFT_RATIO,
        "steady_itl_p99_ms": 1.0,
        "steady_itl_max_ms": 1.0,
    }
    bounds.update({f"qwen2.5-7b.tollbridge.{name}": f"<= {ratio} x single" for name, ratio in limits.items()})
    bounds["qwen2.5-7b.tollbridge.together_tokens_per_s"] = f">= {MIN_TOKENS_RATIO} x single"
    verdicts = [mine[name] <= ratio * single[name] for name, ratio in limits.items()]
    return [*verdicts, mine["together_tokens_per_s"] >= MIN_TOKENS_RATIO * single["together_tokens_per_s"]]


def _judge_06b(arms: dict[str, dict[str, float]], sockets_ms: dict[str, float], bounds: dict[str, str]) -> list[bool]:
    """Bounds of a model that the socket limits."""
    mine, single = arms["tollbridge"], arms["single"]
    verdicts = []
    nixl = [one["together_tokens_per_s"] for name, one in arms.items() if name.startswith("nixl")]
    if nixl:
        bounds["qwen3-0.6b.tollbridge.together_tokens_per_s"] = f">= {MIN_TOKENS_OVER_NIXL} x the best NIXL"
        verdicts.append(mine["together_tokens_per_s"] >= MIN_TOKENS_OVER_NIXL * max(nixl))
    for length, plain_ms in sockets_ms.items():
        name = f"ttft_{length}_ms"
        bounds[f"qwen3-0.6b.tollbridge.{name}"] = f"<= single + {MAX_TOLL_RATIO} x {plain_ms:.1f} (plain sockets)"
        verdicts.append(mine[name] - single[name] <= MAX_TOLL_RATIO * plain_ms)
    return verdicts


def _summary(found: dict[str, Any], arm: str) -> dict[str, float]:
    """Return the medians over repetitions."""
    together, steady = found["together"][arm], found["steady"][arm]
    return {
        **{f"ttft_{n}_ms": float(np.median(found["alone_ttft_ms"][arm][str(n)])) for n in LENGTHS},
        **{f"together_{name}": float(np.median(values)) for name, values in together.items()},
        "steady_itl_p50_ms": steady["itl_p50_ms"],
        "steady_itl_p99_ms": steady["itl_p99_ms"],
        "steady_itl_max_ms": steady["itl_max_ms"],
    }
