"""One request at a time, short prompts to long: what does a split add, by token, and what does that say of the link?

After the second article: the time of a request by one worker and split, by length; the difference by token; the bytes
that crossed over that difference (effective bandwidth) and its share of what a plain socket carries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from tollbridge.bench import schedule
from tollbridge.bench.book import Book
from tollbridge.bench.compare import Comparison, compare, conditions, in_words, labels_of
from tollbridge.bench.figures import DEFINITIONS, remarks, select
from tollbridge.bench.link import raw_goodput
from tollbridge.bench.records import LinkRate
from tollbridge.bench.session import Session, Traffic
from tollbridge.bench.stats import percentile
from tollbridge.config.quantity import show_bytes, show_rate
from tollbridge.errors import ConfigError
from tollbridge.report import svg
from tollbridge.report.document import Document, Section, Table, Tile

TITLE = "Length sweep: what a split adds to a request that is alone"
ARMS = ("one", "one-again", "split")
_TTFT = "ttft_p50_ms"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured."""

    lengths: tuple[int, ...] = (256, 512, 1024, 2048)
    """Prompt tokens."""
    output: int = 8
    """Tokens generated."""
    repeats: int = 2
    """Requests of a length in a window, one after the other."""
    blocks: int = 5
    """Every arm runs once in each."""
    kv_bytes_per_token: float = 0.0
    """Of KV transfers that our router does not report, such as NIXL's."""
    link_bytes_per_s: float = 0.0
    """What plain sockets carry between the workers; measured where the workers are started here."""


async def run(session: Session, settings: Settings) -> None:
    """Warm up by each length, then run the blocks, the link measured before and after each."""
    rng = Random(f"{session.seed} warm")
    lengths = [n for n in settings.lengths if n + settings.output <= session.max_model_len]
    if not lengths:
        raise ConfigError(f"No length fits into a context of {session.max_model_len} tokens.", param="lengths")
    for arm in session.arms:
        warm = [one for length in lengths for one in schedule.fresh([0.0], length, 2, rng, session.vocabulary)]
        await session.ask(arm, warm)
    for block in range(settings.blocks):
        await _link(session, block)
        for length in lengths:

            def traffic(arm: str, length: int = length, block: int = block) -> Traffic:
                own = Random(f"{session.seed} {block} {length} {arm}")
                times = [0.0] * settings.repeats
                requests = schedule.fresh(times, length, settings.output, own, session.vocabulary)
                return Traffic(requests=requests, concurrency=1)

            await session.block(str(length), block, traffic)
        await _link(session, block)


async def _link(session: Session, block: int) -> None:
    if session.options.is_local:
        session.book.link(LinkRate(cell="", block=block, bytes_per_s=await raw_goodput()))


# ── what is said about it ──


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One length."""

    length: int
    before_ms: float
    after_ms: float
    compared: Comparison
    num_bytes: float  # of KV, a request
    wire_s: float  # first to last payload byte

    @property
    def added_s(self) -> float:
        return (self.after_ms - self.before_ms) / 1e3

    @property
    def effective(self) -> float:
        """Bytes/s: what crossed over the time that it added."""
        return self.num_bytes / self.added_s if self.added_s > 0 else float("inf")


def report(book: Book, settings: Settings, arms: Sequence[str]) -> Document:
    """Return what the windows show."""
    rows = [_row(book, settings, cell, arms) for cell in dict.fromkeys(w.cell for w in book.windows)]
    link = settings.link_bytes_per_s or percentile([rate.bytes_per_s for rate in book.links], 50)
    labels = labels_of(book, arms)
    before, after = labels[arms[0]], labels[arms[-1]]
    last = rows[-1]
    return Document(
        title=TITLE,
        headline=_headline(last),
        lead=[f"{after} against {before}, one request at a time; medians over {last.compared.num_blocks} blocks."],
        tiles=[
            Tile(
                label=f"TTFT, {row.length:,} tokens",
                value=f"{row.before_ms:,.0f} → {row.after_ms:,.0f} ms",
                note=f"adds {1e6 * row.added_s / row.length:,.0f} µs a token"
                + ("" if row.compared.claimed(_TTFT, row.compared.main) else ", no difference claimed"),
            )
            for row in rows
        ],
        warnings=remarks(book.samples),
        sections=[
            Section(title="Time to first token", figures=[_curves(rows, before, after)]),
            Section(
                title="By length",
                table=Table(columns=list(_COLUMNS), rows=[_cells(row, link) for row in rows]),
                note="Effective bandwidth: KV bytes over the time that the split added. Wire: payload bytes over first "
                "to last payload byte, which includes waiting for layers that were still being computed.",
            ),
            *(row.compared.section(f"{row.length:,} tokens: paired comparison") for row in rows[-1:]),
        ],
        conditions={"link, plain socket": show_rate(link) if link == link else "not measured", **conditions(book)},
        notes=[DEFINITIONS, in_words(last.compared)],
    )


def _row(book: Book, settings: Settings, cell: str, arms: Sequence[str]) -> _Row:
    compared = compare(book, cell, arms, (_TTFT, "e2e_p50_ms", "tpot_p50_ms"))
    split = select(book.samples, book.windows, cell=cell, arm=arms[-1])
    num_bytes, wire_s = (value if math.isfinite(value) else 0.0 for value in split.wire())
    return _Row(
        length=int(cell),
        before_ms=percentile(compared.values[_TTFT, compared.baseline], 50),
        after_ms=percentile(compared.values[_TTFT, compared.main], 50),
        compared=compared,
        num_bytes=num_bytes or settings.kv_bytes_per_token * (int(cell) - 1),
        wire_s=wire_s,
    )


_COLUMNS = (
    "prompt tokens", "TTFT before", "TTFT split", "ratio, 95 %", "added a token", "KV", "effective bandwidth", "wire",
    "effective over plain socket",
)  # fmt: skip


def _cells(row: _Row, link: float) -> list[str]:
    ratio = row.compared.ratio(_TTFT, row.compared.main)
    share = f"{100 * row.effective / link:,.0f} %" if link == link and link and row.effective < 1e15 else "-"
    return [
        f"{row.length:,}",
        f"{row.before_ms:,.0f} ms",
        f"{row.after_ms:,.0f} ms",
        f"{ratio.mean:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" if ratio else "-",
        f"{1e6 * row.added_s / row.length:,.1f} µs",
        show_bytes(row.num_bytes) if row.num_bytes else "not known",
        show_rate(row.effective) if row.num_bytes and row.effective < 1e15 else "-",
        show_rate(row.num_bytes / row.wire_s) if row.wire_s else "-",
        share if row.num_bytes else "-",
    ]


def _headline(row: _Row) -> str:
    ratio = row.compared.ratio(_TTFT, row.compared.main)
    if ratio is None:
        return "Too many requests failed for an answer: see below."
    if not row.compared.claimed(_TTFT, row.compared.main):
        return f"At {row.length:,} prompt tokens no difference in TTFT can be claimed."
    return f"Alone, a split request of {row.length:,} tokens has its first token after {ratio.mean:.2f} times the time."


def _curves(rows: Sequence[_Row], before: str, after: str) -> str:
    curves = {
        before: [(float(row.length), row.before_ms) for row in rows],
        after: [(float(row.length), row.after_ms) for row in rows],
    }
    shades = (1, 0)[: len(curves)]  # as in other reports; a single arm is one curve
    return svg.lines(curves, x_label="prompt tokens", y_label="TTFT, ms", shades=shades)
