"""What does the router cost? Requests per second, added latency beside other routers, and how long a decision takes.

One trivial upstream (canned answers, 16 events) and one client process with keep-alive connections in a closed loop.
Arms, in rotated order within each repetition, each with whole answers and with streams:

    alone        the client talks to the upstream itself
    tollbridge   our router between them: one process
    vllm-router  the same upstream (Rust)
    dynamo       its frontend over its own mocker, for it speaks no HTTP to workers: only its rate is comparable

Added latency is the median over repetitions of an arm's percentile less that of `alone` in the same repetition, at one
connection. The bound is on decisions; the other figures are there to be compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import uvloop

from benchmarks.support import rivals
from benchmarks.support.bare import BODY, STREAM_BODY, router_over, trivial
from benchmarks.support.decisions import decision_p99_s
from benchmarks.support.hammer import Blows, hammer
from benchmarks.support.result import ClaimResult, Table
from tollbridge.engine.tiny import make_tiny_model

DESCRIPTION = "requests per second and added latency of the router beside others; p99 of a decision"

BODIES = {"whole": BODY, "stream": STREAM_BODY}
MANY = 16
MOST_S = 10.0  # for one arm, kind and concurrency: Dynamo's streams at one connection can take 44 ms each
Seen = dict[tuple[str, str, int], list[Blows]]
BOUNDS_S = {16: 0.5e-3, 64: 3e-3}  # p99 of a decision, by the number of workers


@dataclass(frozen=True)
class Size:
    repetitions: int
    requests: int  # of each arm, kind and concurrency
    decisions: int


def run(quick: bool) -> ClaimResult:
    """Measure, and return the claim's verdict."""
    size = Size(2, 400, 500) if quick else Size(5, 3000, 5000)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seen, arms, missing = runner.run(_measure(size))
    decisions = {n: decision_p99_s(n, num_decisions=size.decisions) for n in BOUNDS_S}  # in a loop of their own
    return _verdict(seen, arms, decisions, missing, size)


async def _measure(size: Size) -> tuple[Seen, list[str], dict[str, str | None]]:
    """Return the blows by (arm, kind, connections), the arms, and why others are missing."""
    missing = {"vllm-router": rivals.missing_vllm_router(), "dynamo": rivals.missing_dynamo()}
    seen: Seen = {}
    async with contextlib.AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(trivial())
        urls = {"alone": upstream, "tollbridge": (await stack.enter_async_context(router_over([upstream])))[0]}
        if missing["vllm-router"] is None:
            urls["vllm-router"] = await stack.enter_async_context(rivals.vllm_router([upstream]))
        if missing["dynamo"] is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            try:
                urls["dynamo"] = await stack.enter_async_context(rivals.dynamo(make_tiny_model(folder / "tiny")))
            except TimeoutError:
                missing["dynamo"] = "it was not ready within 60 s"
        for url in urls.values():
            await hammer(url, BODY, connections=4, requests=100)  # warm
        arms = list(urls)
        for repetition in range(size.repetitions):
            for arm in arms[repetition % len(arms) :] + arms[: repetition % len(arms)]:
                for kind, body in BODIES.items():
                    for connections in (1, MANY):
                        blows = await hammer(
                            urls[arm], body, connections=connections, requests=size.requests, most_s=MOST_S
                        )
                        seen.setdefault((arm, kind, connections), []).append(blows)
    return seen, list(urls), missing


def _verdict(
    seen: Seen,
    arms: list[str],
    decisions: dict[int, float],
    missing: dict[str, str | None],
    size: Size,
) -> ClaimResult:
    figures: dict[str, object] = {f"decision_p99_{n}_workers_s": value for n, value in decisions.items()}
    rows = []
    for arm in arms:
        for kind in BODIES:
            rate = median(blows.rate for blows in seen[arm, kind, MANY])
            errors = sum(blows.errors for n in (1, MANY) for blows in seen[arm, kind, n])
            added = [_added_s(seen, arm, kind, q) for q in (50, 99)]
            name = f"{arm}_{kind}".replace("-", "_")
            figures |= {f"{name}_per_s": rate, f"{name}_errors": errors}
            comparable = arm not in ("alone", "dynamo")
            if comparable:
                figures |= {f"{name}_added_p50_s": added[0], f"{name}_added_p99_s": added[1]}
            shown = [f"{value * 1e3:.2f}" if comparable else "-" for value in added]
            rows.append([arm, kind, f"{rate:.0f}", *shown, str(errors)])
    columns = ["arm", "answers", f"requests/s at {MANY}", "added p50 ms", "added p99 ms", "errors"]
    clean = all(blows.errors == 0 for (arm, _, _), many in seen.items() if arm == "tollbridge" for blows in many)
    return ClaimResult(
        holds=clean and all(value <= BOUNDS_S[n] for n, value in decisions.items()),
        figures=figures,
        bounds={f"decision_p99_{n}_workers_s": f"<= {bound:g}" for n, bound in BOUNDS_S.items()},
        conditions={
            "repetitions": size.repetitions, "requests": size.requests, "events": 16, "policy": "local",
            "policy_of_decisions": "adaptive",
            "missing": {name: why for name, why in missing.items() if why}, "run": secrets.token_hex(4),
        },
        table=Table(title="router-overhead", columns=columns, rows=rows),
    )  # fmt: skip


def _added_s(seen: Seen, arm: str, kind: str, q: float) -> float:
    pairs = zip(seen[arm, kind, 1], seen["alone", kind, 1], strict=True)
    return median(ours.percentile_s(q) - alone.percentile_s(q) for ours, alone in pairs)
