"""Shared prefixes: TTFT, requests per second and cache hits over kinds of prefix and concurrency, by policy.

After the first article: prompts begin with one of 2, 7, 12 or 24 prefixes, 4 or 8 at once; KV-aware routing over
workers that each do both, against a split. The baseline is round robin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from tollbridge.bench import schedule
from tollbridge.bench.book import Book
from tollbridge.bench.compare import Comparison, compare, conditions, in_words, labels_of
from tollbridge.bench.figures import DEFINITIONS, METRICS, remarks, select
from tollbridge.bench.session import Session, Traffic
from tollbridge.report import svg
from tollbridge.report.document import Document, Section, Table, Tile

TITLE = "Prefix grid: shared prefixes by kinds and concurrency"
ARMS = ("round-robin", "kv-aware", "split")
_TTFT, _RATE = "ttft_p50_ms", "requests_per_s"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is sent."""

    kinds: tuple[int, ...] = (2, 7, 12, 24)
    """Different prefixes."""
    concurrency: tuple[int, ...] = (4, 8)
    """Requests at once."""
    prefix_tokens: int = 512
    """Of each prefix."""
    own_tokens: int = 32
    """Of each prompt after its prefix."""
    output_tokens: int = 8
    """Of each answer."""
    requests_per_kind: int = 4
    """Requests of a window, for each prefix; at least twelve."""
    blocks: int = 3
    """Every arm runs once in each; prefixes are new in every block."""


async def run(session: Session, settings: Settings) -> None:
    """Warm up, then run every cell."""
    for arm in session.arms:
        rng = Random(f"{session.seed} warm {arm}")
        await session.ask(arm, schedule.fresh([0.0] * 2, settings.prefix_tokens, 2, rng, session.vocabulary))
    for block in range(settings.blocks):
        for kinds in settings.kinds:
            for concurrency in settings.concurrency:

                def traffic(arm: str, kinds: int = kinds, at_once: int = concurrency, block: int = block) -> Traffic:
                    requests = schedule.with_prefixes(
                        max(12, settings.requests_per_kind * kinds), num_kinds=kinds,
                        prefix_tokens=settings.prefix_tokens,
                        own_tokens=settings.own_tokens, max_tokens=settings.output_tokens, block=block,
                        salt=f"{arm} {kinds} {at_once}", seed=session.seed, vocabulary=session.vocabulary,
                    )  # fmt: skip
                    return Traffic(requests=requests, concurrency=at_once)

                await session.block(name_of(kinds, concurrency), block, traffic)


def name_of(kinds: int, concurrency: int) -> str:
    return f"{kinds} kinds, {concurrency} at once"


# ── what is said about it ──


def report(book: Book, settings: Settings, arms: Sequence[str]) -> Document:
    """Return what the windows show."""
    cells = list(dict.fromkeys(window.cell for window in book.windows))
    compared = {cell: compare(book, cell, arms, (_TTFT, "ttft_p99_ms", _RATE)) for cell in cells}
    labels = labels_of(book, arms)
    hits = {(cell, arm): _hits(book, cell, arm) for cell in cells for arm in arms}
    return Document(
        title=TITLE,
        headline=_headline(compared, labels, arms),
        lead=[
            f"Prompts of {settings.prefix_tokens + settings.own_tokens} tokens, {settings.prefix_tokens} of them "
            "shared; "
            f"against {labels[arms[0]]}."
        ],
        tiles=[_tile(hits, labels, arms, cell) for cell in cells],
        warnings=remarks(book.samples),
        sections=[
            Section(
                title="Time to first token (p50), medians over blocks",
                figures=[_bars(compared, arms, cell) for cell in cells],
            ),
            Section(
                title="All cells",
                table=Table(
                    columns=[
                        "cell",
                        "arm",
                        "TTFT p50",
                        "TTFT p99",
                        "requests/s",
                        "cached prompt tokens",
                        "TTFT ratio, 95 %",
                    ],
                    rows=[_row(book, compared[cell], hits, cell, arm) for cell in cells for arm in arms],
                ),
                note="Cached: prompt tokens found in the workers' own prefix caches over those looked up, by their "
                "counters.",
            ),
        ],
        conditions=conditions(book),
        notes=[DEFINITIONS, in_words(next(iter(compared.values())))],
    )


def _hits(book: Book, cell: str, arm: str) -> float:
    group = select(book.samples, book.windows, cell=cell, arm=arm)
    looked_up = group.counter("vllm:prefix_cache_queries_total")
    return group.counter("vllm:prefix_cache_hits_total") / looked_up if looked_up else math.nan


def _headline(compared: Mapping[str, Comparison], labels: Mapping[str, str], arms: Sequence[str]) -> str:
    parts = []
    if len(arms) == 1:
        return f"TTFT and cache hits of {labels[arms[0]]}, which nothing is compared with."
    if not any(each.claimed(_TTFT, arm) for each in compared.values() for arm in arms[1:]):
        others = " or ".join(labels[arm] for arm in arms[1:])
        return (
            f"No difference in TTFT to {labels[arms[0]]} can be claimed for {others}, in any of {len(compared)} cells."
        )
    for arm in arms[1:]:
        claimed = [each.ratio(_TTFT, arm) for each in compared.values() if each.claimed(_TTFT, arm)]
        means = [ratio.mean for ratio in claimed if ratio is not None]
        told = f"x {_span(means)} in {len(means)}" if means else "no difference claimed in any"
        parts.append(f"{labels[arm]} {told} of {len(compared)} cells")
    return f"TTFT p50 over {labels[arms[0]]}: {'; '.join(parts)}."


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def _tile(hits: Mapping[tuple[str, str], float], labels: Mapping[str, str], arms: Sequence[str], cell: str) -> Tile:
    shares = [f"{hits[cell, arm]:.2f}" if math.isfinite(hits[cell, arm]) else "not known" for arm in arms]
    return Tile(
        label=f"{cell}: share of prompt tokens cached",
        value=" → ".join(shares),
        note=" → ".join(labels[arm] for arm in arms),
    )


def _bars(compared: Mapping[str, Comparison], arms: Sequence[str], cell: str) -> str:
    each = compared[cell]
    items = []
    for at, arm in enumerate(arms):
        values = sorted(each.values[_TTFT, arm])
        value = values[len(values) // 2] if values else math.nan
        items.append((each.label(arm), value, f"{value:,.0f} ms", (1, 3, 0, 2, 4)[at % 5]))
    return svg.bars(items, title=cell)


def _row(book: Book, each: Comparison, hits: Mapping[tuple[str, str], float], cell: str, arm: str) -> list[str]:
    group = select(book.samples, book.windows, cell=cell, arm=arm)
    ratio = each.ratio(_TTFT, arm) if arm != each.baseline else None
    share = hits[cell, arm]
    return [
        cell,
        each.label(arm),
        f"{METRICS[_TTFT](group):,.0f} ms",
        f"{METRICS['ttft_p99_ms'](group):,.0f} ms",
        f"{METRICS[_RATE](group):.2f}",
        f"{share:.2f}" if math.isfinite(share) else "not known",
        f"{ratio.mean:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" if ratio else "",
    ]
