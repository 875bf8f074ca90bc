"""Requests as they came somewhere: a recorded trace (Azure, Mooncake) replayed on any arms, scaled, and stated so.

Block b replays the b-th stretch of the trace. Lengths are divided by `scale` and cut at the limits, arrivals are
squeezed or stretched to `rate` on average: what is replayed is the trace's pattern, not its load. Mooncake's traces
know which prefixes are shared, and they stay shared; Azure's do not, so nothing is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from tollbridge.bench import schedule
from tollbridge.bench.book import Book
from tollbridge.bench.compare import compare, conditions, in_interval, in_words, labels_of, spread_table
from tollbridge.bench.figures import DEFINITIONS, remarks, select
from tollbridge.bench.records import Planned
from tollbridge.bench.session import Session, Traffic
from tollbridge.errors import ConfigError
from tollbridge.report.document import Document
from tollbridge.sim.arrivals import Arrival
from tollbridge.sim.files import read_trace
from tollbridge.sim.scenario import TraceSpec

TITLE = "A recorded trace, replayed"
ARMS = ("both", "both-again", "split", "adaptive")
CELL = "trace"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is replayed."""

    azure: str = ""
    """A CSV file of AzurePublicDataset (2023)."""
    mooncake: str = ""
    """A JSON lines file in Mooncake's format."""
    rate: float = 1.0
    """Arrivals per second, on average over a block."""
    scale: float = 8.0
    """Prompt and output lengths are divided by it."""
    max_prompt: int = 1024
    """Longer prompts are cut."""
    max_output: int = 64
    """Longer answers are cut."""
    requests: int = 24
    """Of a block."""
    bucket_s: float = 0.0
    """Arrivals were recorded in buckets of so many seconds: spread them inside."""
    blocks: int = 3
    """Every arm runs once in each."""


async def run(session: Session, settings: Settings) -> None:
    """Warm up, then replay."""
    arrivals = read(settings)
    for arm in session.arms:
        rng = Random(f"{session.seed} warm {arm}")
        await session.ask(arm, schedule.fresh([0.0] * 2, settings.max_prompt // 2, 4, rng, session.vocabulary))
    for block in range(settings.blocks):

        def traffic(arm: str, block: int = block) -> Traffic:
            requests = stretch(arrivals, settings, block, f"{session.seed} {block} {arm}", session.vocabulary)
            return Traffic(requests=requests, duration_s=requests[-1].at_s)

        await session.block(CELL, block, traffic)


def read(settings: Settings) -> list[Arrival]:
    """Return the arrivals of all blocks; ConfigError when there is no trace, or too short a one."""
    if bool(settings.azure) == bool(settings.mooncake):
        raise ConfigError("Give one trace: --azure FILE or --mooncake FILE.", param="trace")
    number = settings.blocks * settings.requests
    spec = TraceSpec(
        format="azure" if settings.azure else "mooncake",
        path=settings.azure or settings.mooncake,
        max_requests=number,
        bucket_s=settings.bucket_s,
    )
    arrivals = read_trace(spec)
    if len(arrivals) < number:
        raise ConfigError(
            f"The trace {spec.path} has {len(arrivals)} requests, {number} are asked for: fewer --requests."
        )
    return arrivals


def stretch(
    arrivals: Sequence[Arrival], settings: Settings, block: int, salt: str, vocabulary: tuple[int, int]
) -> list[Planned]:
    """Return the requests of a block, from time 0, at the rate that was asked for."""
    mine = arrivals[block * settings.requests : (block + 1) * settings.requests]
    first_s, span_s = mine[0].at_s, mine[-1].at_s - mine[0].at_s
    speed = span_s * settings.rate / len(mine) or 1.0
    moved = [arrival._replace(at_s=(arrival.at_s - first_s) / speed) for arrival in mine]
    return schedule.from_trace(
        moved, scale=settings.scale, max_prompt=settings.max_prompt, max_output=settings.max_output, salt=salt,
        vocabulary=vocabulary,
    )  # fmt: skip


_METRICS = ("ttft_p50_ms", "ttft_p99_ms", "itl_p99_ms", "tokens_per_s_per_worker")
_ROWS = (
    "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "itl_max_ms", "tpot_p50_ms", "requests_per_s",
    "tokens_per_s", "send_lag_p99_ms",
)  # fmt: skip


def report(book: Book, settings: Settings, arms: Sequence[str]) -> Document:
    """Return what the windows show."""
    labels = labels_of(book, arms)
    groups = {arm: select(book.samples, book.windows, cell=CELL, arm=arm) for arm in arms}
    compared = compare(book, CELL, arms, _METRICS)
    told = []
    for arm in arms[1:]:
        ratio = compared.ratio("ttft_p50_ms", arm)
        if ratio is not None and arm != compared.again:
            claimed = compared.claimed("ttft_p50_ms", arm)
            told.append(f"{labels[arm]} {in_interval(ratio) if claimed else 'no difference claimed'}")
    return Document(
        title=TITLE,
        headline=f"TTFT p50 over {labels[arms[0]]}: {'; '.join(told) or 'too many requests failed'}.",
        lead=[
            f"{settings.requests} requests a block of {settings.azure or settings.mooncake}, lengths divided by "
            f"{settings.scale:g} and cut at {settings.max_prompt} and {settings.max_output}, replayed at "
            f"{settings.rate:g} requests/s on average."
        ],
        warnings=remarks(book.samples),
        sections=[compared.section(), spread_table("Pooled over blocks", groups, arms, labels, _ROWS)],
        conditions=conditions(book),
        notes=[DEFINITIONS, in_words(compared)],
    )
