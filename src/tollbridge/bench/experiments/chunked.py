"""Chunked prefill, the alternative to a split: how short do chunks make the gaps, and what do they cost?

The same load as `interference`, on one worker whose chunks are short, middling and long, and on a split. A chunk is the
most prompt tokens that go into one step (`max_num_batched_tokens`): shorter ones stop the streams for less long and
make the prompt wait longer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from tollbridge.bench import local
from tollbridge.bench.book import Book
from tollbridge.bench.compare import compare, conditions, in_words, labels_of, said, spread_table
from tollbridge.bench.experiments import interference
from tollbridge.bench.experiments.interference import CELL
from tollbridge.bench.figures import DEFINITIONS, remarks, select
from tollbridge.bench.local import Local, Started
from tollbridge.bench.stats import percentile
from tollbridge.report import svg
from tollbridge.report.document import Document, Section

TITLE = "Chunked prefill against a split"
_GAP, _TTFT = "steady_itl_p99_ms", "ttft_p50_ms"
run = interference.run


@dataclass(frozen=True, kw_only=True)
class Settings(interference.Settings):
    """As of `interference`, and the chunks."""

    chunks: tuple[int, ...] = (512, 128, 32)
    """Prompt tokens in a step, of the workers that are started here; the first is the baseline."""
    budget_s: float = 240.0
    """No block begins that would end later than so long after the first; three are run in any case."""


@asynccontextmanager
async def start(given: Local, settings: Settings) -> AsyncIterator[Started]:
    """Start a worker for each length of chunks, and a pair that splits. Those that are idle cost memory only."""
    async with AsyncExitStack() as stack:
        found = Started()
        for chunk in settings.chunks:
            engine = {**given.engine, "max_num_batched_tokens": chunk}
            alone = replace(given, names=["d0"], engine=engine)
            fleet = await stack.enter_async_context(local.started(alone))
            found.add(
                fleet, local.arms_of(fleet, [local.ONE]), name=f"chunk-{chunk}", title=f"chunks of {chunk} tokens"
            )
        fleet = await stack.enter_async_context(local.started(given))
        found.add(fleet, local.arms_of(fleet, [local.SPLIT]))
        yield found


def report(book: Book, settings: Settings, arms: Sequence[str]) -> Document:
    """Return what the windows show."""
    labels = labels_of(book, arms)
    groups = {arm: select(book.samples, book.windows, cell=CELL, arm=arm) for arm in arms}
    compared = compare(book, CELL, arms, (_GAP, _TTFT, "tokens_per_s_per_worker"))
    middle = {(metric, arm): percentile(compared.values[metric, arm], 50) for metric in (_GAP, _TTFT) for arm in arms}
    gap, ttft = compared.ratio(_GAP, compared.main, arms[-2]), compared.ratio(_TTFT, compared.main, arms[-2])
    main = labels[arms[-1]]
    told = f"p99 of the gaps {said(gap)}, TTFT {said(ttft)}"
    return Document(
        title=TITLE,
        headline=f"{main[0].upper()}{main[1:]} against {labels[arms[-2]]}: {told}.",
        lead=[f"{settings.streams} streams decode while long prompts arrive, as in interference; medians over blocks."],
        warnings=remarks(book.samples),
        sections=[
            Section(
                title="Gaps", figures=[_bars(middle, arms, labels, _GAP, "Longest waits between tokens (ITL p99)")]
            ),
            Section(
                title="Price", figures=[_bars(middle, arms, labels, _TTFT, "First token of a long prompt (TTFT p50)")]
            ),
            compared.section(),
            spread_table("All figures, pooled over blocks", groups, arms, labels, (_GAP, "steady_itl_max_ms", _TTFT)),
        ],
        conditions=conditions(book),
        notes=[DEFINITIONS, in_words(compared)],
    )


def _bars(
    middle: Mapping[tuple[str, str], float], arms: Sequence[str], labels: Mapping[str, str], metric: str, title: str
) -> str:
    shades = [*[1, 3, 2, 4][: len(arms) - 1], 0]
    items = [
        (labels[arm], middle[metric, arm], f"{middle[metric, arm]:,.0f} ms", shades[at % len(shades)])
        for at, arm in enumerate(arms)
    ]
    return svg.bars(items, title=title)
