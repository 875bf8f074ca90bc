"""Do TTFT, TPOT and throughput of `tollbridge bench` agree with `vllm bench serve` and AIPerf on the same server?

The server computes nothing and streams each token when its own clock says (TTFT 150 ms, gap 25 ms), in a process of its
own, so what differs is the clients. All send a closed loop of the same size, in rotated order within each repetition.
The claim holds when the medians of both others are within 5 % of ours in all three figures.

The definitions are the same, under other names: AIPerf's "inter token latency" is a mean by request, our TPOT. Where
they are not the same nothing is compared: goodput (vLLM leaves failed requests out and counts one-token outputs as TPOT
0) and ITL percentiles (AIPerf has none of single gaps).

TOLLBRIDGE_VLLM_PYTHON names vLLM's interpreter; TOLLBRIDGE_AIPERF_PYTHON that of an environment with
`pip install aiperf==0.13.0`.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from random import Random

from benchmarks.support.bare import ROOT
from benchmarks.support.others import OtherFailedError, Seen, Work, aiperf, vllm_serve
from benchmarks.support.repeat import alternate
from benchmarks.support.result import ClaimResult, Table, unavailable
from tollbridge.bench import schedule
from tollbridge.bench.book import Book
from tollbridge.bench.figures import as_vllm, select
from tollbridge.bench.records import Arm, Head
from tollbridge.bench.session import Options, Session, Traffic

DESCRIPTION = "TTFT, TPOT and throughput agree with `vllm bench serve` and AIPerf on the same server within 5 %"

TTFT_S, GAP_S = 0.15, 0.025
PROMPT_TOKENS, OUTPUT_TOKENS, CONCURRENCY = 64, 64, 4
BOUND = 0.05
VARIABLES = {"vllm": "TOLLBRIDGE_VLLM_PYTHON", "aiperf": "TOLLBRIDGE_AIPERF_PYTHON"}


def run(quick: bool) -> ClaimResult:
    """Measure, and return the claim's verdict."""
    pythons = {name: os.environ.get(variable, "") for name, variable in VARIABLES.items()}
    missing = [VARIABLES[name] for name, python in pythons.items() if not Path(python).is_file()]
    if missing:
        return unavailable(f"Set {' and '.join(missing)} to an interpreter that has it (see the claim's file).")
    requests, repetitions = (16, 1) if quick else (32, 3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        argv = [sys.executable, "-m", "benchmarks.support.upstream", str(TTFT_S), str(GAP_S)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
            try:
                assert server.stdout is not None
                work = _work(server.stdout.readline().strip(), folder, requests)
                seen = alternate(_clients(work, folder, pythons), repetitions)
            except OtherFailedError as error:
                return unavailable(str(error))
            finally:
                server.kill()
    return _verdict(seen, requests)


def _work(url: str, folder: Path, requests: int) -> Work:
    from tollbridge.engine.tiny import make_tiny_model

    return Work(
        url=url, tokenizer=make_tiny_model(folder / "tiny"), prompt_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS,
        requests=requests, concurrency=CONCURRENCY,
    )  # fmt: skip


def _clients(work: Work, folder: Path, pythons: Mapping[str, str]) -> dict[str, Callable[[], Seen]]:
    def fresh() -> Path:
        return Path(tempfile.mkdtemp(dir=folder))

    return {
        "tollbridge": lambda: asyncio.run(_ours(work, fresh())),
        "vllm": lambda: vllm_serve(pythons["vllm"], work, fresh()),
        "aiperf": lambda: aiperf(pythons["aiperf"], work, fresh()),
    }


async def _ours(work: Work, folder: Path) -> Seen:
    head = Head(experiment="crosscheck", parameters={}, arms=["it"], seed=1)
    book = Book(folder / "records.jsonl", head)
    requests = schedule.fresh([0.0] * work.requests, work.prompt_tokens, work.output_tokens, Random(1))
    async with Session(book, [Arm(name="it", url=work.url)], Options(), lambda _: None) as session:
        await session.window("it", 0, "it", Traffic(requests=requests, concurrency=work.concurrency))
    found = as_vllm(select(book.samples, book.windows))
    values = [found[name] for name in ("mean_ttft_ms", "mean_tpot_ms", "output_throughput")]
    ttft_ms, tpot_ms, tokens_per_s = (value for value in values if isinstance(value, float))
    return Seen(ttft_ms=ttft_ms, tpot_ms=tpot_ms, tokens_per_s=tokens_per_s)


def _verdict(seen: Mapping[str, list[Seen]], requests: int) -> ClaimResult:
    medians = {
        name: {key: statistics.median(asdict(one)[key] for one in runs) for key in asdict(runs[0])}
        for name, runs in seen.items()
    }
    ours = medians["tollbridge"]
    off = {f"{name}.{key}_off": medians[name][key] / ours[key] - 1 for name in ("vllm", "aiperf") for key in ours}
    return ClaimResult(
        holds=all(abs(value) <= BOUND for value in off.values()),
        figures={**medians, **off},
        bounds=dict.fromkeys(off, f"within {BOUND:g}"),
        conditions={
            "server": f"TTFT {1e3 * TTFT_S:g} ms, gap {1e3 * GAP_S:g} ms by its own clock, {OUTPUT_TOKENS} tokens",
            "load": f"{requests} requests, {CONCURRENCY} at once, closed loop",
            "repetitions": len(seen["tollbridge"]),
            "definitions": "means; AIPerf's inter token latency is our TPOT",
        },
        table=Table(
            title="The same server by three clients, medians over repetitions",
            columns=["figure", *medians],
            rows=[[key, *(f"{medians[name][key]:,.2f}" for name in medians)] for key in ours],
        ),
    )
