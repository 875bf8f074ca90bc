"""vLLM on one GPU, two servers: a split by Tollbridge and by NIXL against one of the servers alone.

Dummy weights, prefix caching off, prompts of random token ids, legs sent by the benchmark itself, loopback TCP. All
servers of a model are up at once and arms alternate within each repetition. Two servers share one GPU: while one
prefills, the other's decode steps are time-sliced with it, which no transport can mend.

Environment: VLLM_GPU_SHAPES (comma-separated, default both), VLLM_GPU_TRANSPORTS (tollbridge,nixl-cuda,nixl-push),
VLLM_GPU_LOGS (a folder for the servers' logs).
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.gpu.measure import LENGTHS, Runner
from benchmarks.gpu.servers import Pair, Server, start, stop, wait_healthy
from benchmarks.gpu.shapes import SHAPES, kv_bytes_per_token, make_model
from benchmarks.support.result import ClaimResult, Table

DESCRIPTION = "vLLM on a GPU: TTFT, ITL and throughput of a split against one server alone, beside NIXL (needs a GPU)"

MAX_TTFT_RATIO = 1.5
MIN_TOKENS_RATIO = 0.8
MIN_TOKENS_OVER_NIXL = 8  # of Qwen3-0.6B, which the socket limits and not prefill
STEADY_S, STEADY_INTERVAL_S = 12.0, 0.75
SERVER_ARGS = ["--kv-cache-memory-bytes", "6000000000", "--gpu-memory-utilization", "0.2"]


def run(quick: bool) -> ClaimResult:
    """Measure every shape, and judge Qwen2.5-7B's bounds."""
    shapes = os.environ.get("VLLM_GPU_SHAPES", ",".join(SHAPES)).split(",")
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
    servers: list[Server] = []
    try:
        pairs = {}
        for index, transport in enumerate(transports):
            both = [
                start(f"{shape}-{transport}-{role}", model, transport, 2 * index + side, logs, SERVER_ARGS)
                for side, role in enumerate(("prefill", "decode"))
            ]
            servers += both
            pairs[transport] = Pair(transport, *both)
        await wait_healthy(servers)
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_read=60)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            runner = Runner(session, pairs, rng, repetitions)
            await runner.warm_up()
            idle = {server.name: server.rss_bytes() for server in servers}
            figures: dict[str, Any] = {
                "kv_bytes_per_token": kv_bytes_per_token(shape),
                "alone_ttft_ms": await runner.alone(),
                "together": await runner.together(),
                "steady": await runner.steady(STEADY_S, STEADY_INTERVAL_S),
            }
            figures["rss_above_idle_mib"] = {s.name: (s.rss_bytes() - idle[s.name]) / 2**20 for s in servers}
            return figures
    finally:
        stop(servers)


def _verdict(figures: dict[str, dict[str, Any]], transports: list[str], seed: int) -> ClaimResult:
    bounds: dict[str, str] = {}
    summary: dict[str, Any] = {}
    rows = []
    holds = True
    for shape, found in figures.items():
        summary[shape] = {arm: _summary(found, arm) for arm in ("single", *transports)}
        rows += [[shape, arm, *(f"{value:.1f}" for value in one.values())] for arm, one in summary[shape].items()]
    if "qwen2.5-7b" in summary and "tollbridge" in transports:
        mine, single = summary["qwen2.5-7b"]["tollbridge"], summary["qwen2.5-7b"]["single"]
        limits = {
            **{f"ttft_{n}_ms": MAX_TTFT_RATIO for n in (2048, 4096)},
            "together_ttft_p50_ms": MAX_TTFT_RATIO,
            "steady_itl_p99_ms": 1.0,
            "steady_itl_max_ms": 1.0,
        }
        for name, ratio in limits.items():
            holds &= mine[name] <= ratio * single[name]
            bounds[f"qwen2.5-7b.tollbridge.{name}"] = f"<= {ratio} x single"
        holds &= mine["together_tokens_per_s"] >= MIN_TOKENS_RATIO * single["together_tokens_per_s"]
        bounds["qwen2.5-7b.tollbridge.together_tokens_per_s"] = f">= {MIN_TOKENS_RATIO} x single"
    nixl = [name for name in transports if name.startswith("nixl")]
    if "qwen3-0.6b" in summary and "tollbridge" in transports and nixl:
        best = max(summary["qwen3-0.6b"][name]["together_tokens_per_s"] for name in nixl)
        holds &= summary["qwen3-0.6b"]["tollbridge"]["together_tokens_per_s"] >= MIN_TOKENS_OVER_NIXL * best
        bounds["qwen3-0.6b.tollbridge.together_tokens_per_s"] = f">= {MIN_TOKENS_OVER_NIXL} x the best NIXL"
    columns = ["model", "arm", *next(iter(summary[next(iter(summary))].values()))]
    return ClaimResult(
        holds=holds and bool(bounds),
        figures={"summary": summary, "raw": figures},
        bounds=bounds,
        conditions={"seed": seed, "transports": transports, "steady_s": STEADY_S, "interval_s": STEADY_INTERVAL_S,
                    "servers": "two per transport, all on one GPU, CUDA graphs at the default"},
        table=Table(title="one GPU, two vLLM servers", columns=columns, rows=rows),
    )  # fmt: skip


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
