"""What does a worker's memory do when many requests are split at once?

After the first article, whose prefill worker was killed at its limit after a handful of requests: resident memory of
both workers over time, at 1, 4 and 8 requests at once. With bounded rings it must not follow the concurrency. The KV
cache is filled first: pages of it that are touched for the first time would look like growth.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from random import Random

from tollbridge.bench import local, schedule
from tollbridge.bench.book import Book
from tollbridge.bench.compare import conditions
from tollbridge.bench.figures import remarks, select
from tollbridge.bench.local import Local, Started
from tollbridge.bench.records import Window
from tollbridge.bench.session import Session, Traffic
from tollbridge.config.quantity import show_bytes
from tollbridge.plan.memory import MARGIN
from tollbridge.report import svg
from tollbridge.report.document import Document, Section, Table, Tile

TITLE = "Memory of the workers while requests are split"
ARMS = ("split",)
KV_CACHE_MIB = 256  # of workers that are started here: soon full
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is sent."""

    concurrency: tuple[int, ...] = (1, 4, 8)
    """Requests at once."""
    prompt_tokens: int = 512
    """Of every prompt."""
    output_tokens: int = 4
    """Of every answer."""
    requests: int = 16
    """At each concurrency."""
    warm: int = 16
    """Requests before, to fill the KV cache."""
    limit_mib: float = 0.0
    """The limit of a worker, to be drawn; 0: none."""


@asynccontextmanager
async def start(given: Local, settings: Settings) -> AsyncIterator[Started]:
    """Start a pair with a small KV cache."""
    engine = {**given.engine, "kv_cache_mib": KV_CACHE_MIB}
    async with local.start(replace(given, engine=engine), ARMS) as found:
        yield found


async def run(session: Session, settings: Settings) -> None:
    """Run one window at each concurrency, from the least to the most."""
    session.options.memory = True
    for arm in session.arms:
        warm = schedule.fresh(
            [0.0] * settings.warm, settings.prompt_tokens, 2, Random(f"{session.seed} {arm}"), session.vocabulary
        )
        await session.ask(arm, warm, concurrency=2)
    for at_once in sorted(settings.concurrency):

        def traffic(arm: str, at_once: int = at_once) -> Traffic:
            rng, times = Random(f"{session.seed} {arm} {at_once}"), [0.0] * settings.requests
            requests = schedule.fresh(times, settings.prompt_tokens, settings.output_tokens, rng, session.vocabulary)
            return Traffic(requests=requests, concurrency=at_once)

        await session.block(f"{at_once} at once", 0, traffic)


def report(book: Book, settings: Settings, arms: Sequence[str]) -> Document:
    """Return what was seen."""
    windows = [window for window in book.windows if window.arm == arms[-1]]
    workers = sorted({name for window in windows for name in window.memory})
    peaks = {(w.cell, name): max((size for _, size in w.memory.get(name, ())), default=0.0)
             for w in windows for name in workers}  # fmt: skip
    first, last = windows[0], windows[-1]
    request_bytes, _ = select(book.samples, book.windows, arm=arms[-1]).wire()
    growth = {name: peaks[last.cell, name] - peaks[first.cell, name] for name in workers}
    worst = max(growth.values(), default=0.0)
    known = request_bytes == request_bytes
    held = show_bytes(int(last.cell.split()[0]) * request_bytes) if known else ""
    staged = f", where those requests have {held} of KV" if known else ""
    return Document(
        title=TITLE,
        headline=f"From {first.cell} to {last.cell} the peak of a worker's memory grew by {show_bytes(worst)}{staged}."
        if workers
        else "No worker's memory could be seen: start them here, or name them with workers=URL.",
        lead=[f"{settings.requests} requests of {settings.prompt_tokens} tokens at each concurrency."],
        tiles=[
            Tile(
                label=f"{name}, peak",
                value=f"{peaks[first.cell, name] / MIB:,.0f} → {peaks[last.cell, name] / MIB:,.0f} MiB",
                note=f"{first.cell} → {last.cell}; with the plan's margin a limit of "
                f"{peaks[last.cell, name] * (1 + MARGIN) / MIB:,.0f} MiB",
            )
            for name in workers
        ],
        warnings=remarks(book.samples),
        sections=[Section(title=f"{name} over time", figures=[_curve(windows, name, settings)]) for name in workers]
        + [
            Section(
                title="Peaks",
                table=Table(
                    columns=["", *workers],
                    rows=[[w.cell, *(f"{peaks[w.cell, name] / MIB:,.0f} MiB" for name in workers)] for w in windows],
                ),
                note="Memory of the process and its children; a page that n processes map counts as an n-th (PSS).",
            )
        ],
        conditions=conditions(book),
    )


def _curve(windows: Sequence[Window], name: str, settings: Settings) -> str:
    curves = {w.cell: [(at_s, size / MIB) for at_s, size in w.memory.get(name, ())] for w in windows}
    limits = {"limit": settings.limit_mib} if settings.limit_mib else {}
    return svg.lines(curves, x_label="seconds into the window", y_label="resident, MiB", limits=limits, dots=False)
