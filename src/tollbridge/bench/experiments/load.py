"""Plain load on any servers: open loop (even, Poisson, gamma) or closed loop, random prompts of one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from tollbridge.bench import schedule
from tollbridge.bench.book import Book
from tollbridge.bench.compare import Comparison, compare, conditions, in_interval, in_words, labels_of, spread_table
from tollbridge.bench.figures import DEFINITIONS, remarks, select
from tollbridge.bench.session import Session, Traffic
from tollbridge.report.document import Document, Tile

TITLE = "Load"
ARMS = ("one", "one-again", "both", "split")
CELL = "load"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is sent."""

    rate: float = 0.0
    """Arrivals per second; 0: a closed loop."""
    cv: float = 1.0
    """Variation of the gaps between arrivals: 1 Poisson, 0 even, above 1 bursts (gamma)."""
    concurrency: int = 4
    """Requests at once, of a closed loop."""
    requests: int = 16
    """Requests of a window, of a closed loop."""
    duration: float = 20.0
    """Seconds of arrivals of a window, of an open loop."""
    prompt_tokens: int = 256
    """Of every prompt."""
    output_tokens: int = 32
    """Of every answer."""
    blocks: int = 5
    """Every arm runs once in each."""
    warmup: int = 4
    """Requests by each arm that are not counted."""


async def run(session: Session, settings: Settings) -> None:
    """Warm up, then run the blocks."""
    rng = Random(f"{session.seed} warm")
    for arm in session.arms:
        times = [0.0] * settings.warmup
        warm = schedule.fresh(times, settings.prompt_tokens, min(8, settings.output_tokens), rng, session.vocabulary)
        await session.ask(arm, warm, concurrency=min(4, settings.warmup))
    for block in range(settings.blocks):
        await session.block(CELL, block, lambda arm: traffic(session, settings, block, arm))  # noqa: B023


def traffic(session: Session, settings: Settings, block: int, arm: str) -> Traffic:
    times = [0.0] * settings.requests
    if settings.rate:
        drawn = Random(f"{session.seed} {block} times")
        times = schedule.arrival_times(settings.rate, settings.duration, settings.cv, drawn)
    rng = Random(f"{session.seed} {block} {arm}")
    requests = schedule.fresh(times, settings.prompt_tokens, settings.output_tokens, rng, session.vocabulary)
    if settings.rate:
        return Traffic(requests=requests, duration_s=settings.duration)
    return Traffic(requests=requests, concurrency=settings.concurrency)


_METRICS = ("ttft_p50_ms", "itl_p99_ms", "tpot_p50_ms", "requests_per_s", "tokens_per_s_per_worker")
_ROWS = (
    "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "itl_max_ms", "tpot_p50_ms", "e2e_p50_ms",
    "requests_per_s", "tokens_per_s", "tokens_per_s_per_worker", "queue_mean_ms", "cached_share", "kv_mb_per_split",
    "wire_p50_ms", "joules_per_token", "send_lag_p99_ms",
)  # fmt: skip


def report(book: Book, settings: Settings, arms: Sequence[str]) -> Document:
    """Return what the windows show."""
    labels = labels_of(book, arms)
    groups = {arm: select(book.samples, book.windows, cell=CELL, arm=arm) for arm in arms}
    compared = compare(book, CELL, arms, _METRICS)
    way = f"{settings.rate:g} requests/s arrive" if settings.rate else f"{settings.concurrency} requests at once"
    several = len(arms) > 1
    return Document(
        title=TITLE,
        headline=_headline(compared) if several else f"Served: {way}.",
        lead=[f"{way}, {settings.prompt_tokens} prompt tokens, {settings.output_tokens} output tokens."],
        tiles=_tiles(compared) if several else [],
        warnings=remarks(book.samples),
        sections=[
            spread_table("All figures, pooled over blocks", groups, arms, labels, _ROWS),
            *([compared.section()] if several else []),
        ],
        conditions=conditions(book),
        notes=[DEFINITIONS, *([in_words(compared)] if several else [])],
    )


def _headline(compared: Comparison) -> str:
    ratio = compared.ratio("ttft_p50_ms", compared.main)
    if ratio is None:
        return "Too many requests failed for an answer: see below."
    told = in_interval(ratio) if compared.claimed("ttft_p50_ms", compared.main) else "no difference can be claimed"
    return f"TTFT p50, {compared.label(compared.main)} over {compared.label(compared.baseline)}: {told}."


def _tiles(compared: Comparison) -> list[Tile]:
    return [
        compared.tile("ttft_p50_ms", "TTFT p50", "ms", lower_is_better=True),
        compared.tile("itl_p99_ms", "ITL p99", "ms", lower_is_better=True),
        compared.tile("tokens_per_s_per_worker", "Tokens/s per worker", "tok/s", lower_is_better=False),
    ]
