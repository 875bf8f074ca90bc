"""How many requests per second meet their SLO, by policy? After DistServe's figure: attainment over rate.

Poisson arrivals at a rate; a rate holds when the share of requests that meet all SLOs is at least `share`; the limit is
found by bisection and reported with its bracket. A failed request is a missed one. Arms see the same arrivals at the
same rate. The exact 95 % interval of each share (Clopper and Pearson) says how far to trust it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from tollbridge.bench import schedule
from tollbridge.bench.book import Book
from tollbridge.bench.bracket import Tried, edges, next_rate
from tollbridge.bench.compare import conditions, labels_of
from tollbridge.bench.figures import DEFINITIONS, Slo, remarks, select
from tollbridge.bench.session import SLO_PRESETS, Session, Traffic
from tollbridge.bench.stats import clopper_pearson
from tollbridge.errors import ConfigError
from tollbridge.report import svg
from tollbridge.report.document import Document, Section, Table, Tile

TITLE = "Goodput: requests per second that meet their SLO"
ARMS = ("both", "split", "adaptive")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is sent, and what is good."""

    slo: str = "server"
    """server | interactive | server-70b | interactive-70b: MLPerf's TTFT and TPOT."""
    ttft_s: float = 0.0
    """Instead of the preset's."""
    tpot_s: float = 0.0
    """Instead of the preset's."""
    share: float = 0.9
    """Of the requests, that must be good."""
    first_rate: float = 0.5
    """Arrivals per second to begin with."""
    duration: float = 15.0
    """Seconds of arrivals at each rate."""
    steps: int = 2
    """Halvings of the bracket."""
    prompt_tokens: int = 256
    """Of every prompt."""
    output_tokens: int = 16
    """Of every answer."""


def slo_of(settings: Settings) -> Slo:
    """Return the objectives; ConfigError for a preset that there is not."""
    if settings.slo not in SLO_PRESETS:
        raise ConfigError(f"There is no SLO {settings.slo!r}: choose one of {', '.join(SLO_PRESETS)}.", param="slo")
    preset = SLO_PRESETS[settings.slo]
    return Slo(ttft_s=settings.ttft_s or preset.ttft_s, tpot_s=settings.tpot_s or preset.tpot_s)


async def run(session: Session, settings: Settings) -> None:
    """Find each arm's limit; arms take turns, rate by rate."""
    slo = slo_of(settings)
    for arm in session.arms:
        rng = Random(f"{session.seed} warm {arm}")
        await session.ask(arm, schedule.fresh([0.0] * 3, settings.prompt_tokens, 4, rng, session.vocabulary))
    busy = True
    while busy:
        busy = False
        for arm in session.arms:
            rate = next_rate(_tried(session.book, arm, slo, settings), settings.first_rate, settings.steps)
            if rate is not None:
                busy = True
                await session.window(f"{rate:.4g}/s", 0, arm, _traffic(session, settings, arm, rate))


def _traffic(session: Session, settings: Settings, arm: str, rate: float) -> Traffic:
    times = schedule.arrival_times(rate, settings.duration, 1.0, Random(f"{session.seed} {rate:.4g}"))
    rng = Random(f"{session.seed} {rate:.4g} {arm}")
    requests = schedule.fresh(times or [0.0], settings.prompt_tokens, settings.output_tokens, rng, session.vocabulary)
    return Traffic(requests=requests, duration_s=settings.duration, drain_s=30.0)


def _tried(book: Book, arm: str, slo: Slo, settings: Settings) -> list[Tried]:
    windows = [window for window in book.windows if window.arm == arm]
    return [
        Tried(rate=_rate(window.cell), holds=_share(book, arm, window.cell, slo)[2] >= settings.share)
        for window in windows
    ]


def _rate(cell: str) -> float:
    return float(cell.removesuffix("/s"))


def _share(book: Book, arm: str, cell: str, slo: Slo) -> tuple[int, int, float]:
    """Return (good, all, share) of the requests at a rate."""
    requests = select(book.samples, book.windows, cell=cell, arm=arm).requests
    good = sum(map(slo.met, requests))
    return good, len(requests), good / len(requests) if requests else 1.0


# ── what is said about it ──


def report(book: Book, settings: Settings, arms: Sequence[str]) -> Document:
    """Return each arm's bracket."""
    slo, labels = slo_of(settings), labels_of(book, arms)
    brackets = {arm: edges(_tried(book, arm, slo, settings)) for arm in arms}
    wanted = f"TTFT {slo.ttft_s} s and TPOT {slo.tpot_s} s"
    return Document(
        title=TITLE,
        headline="The SLO holds up to: " + "; ".join(f"{labels[arm]} {_between(*brackets[arm])}" for arm in arms) + ".",
        lead=[
            f"Highest rate at which {100 * settings.share:.0f} % of the requests meet {wanted}; "
            f"{settings.prompt_tokens} prompt and {settings.output_tokens} output tokens, Poisson arrivals for "
            f"{settings.duration:g} s a rate."
        ],
        tiles=[Tile(label=labels[arm], value=_between(*brackets[arm]), note="held to failed") for arm in arms],
        warnings=[*remarks(book.samples), "One window a rate and arm: a bracket, not an interval over blocks."],
        sections=[
            Section(title="Share that meets the SLO, by rate", figures=[_curves(book, slo, labels, arms, settings)]),
            Section(
                title="All rates",
                table=Table(
                    columns=["arm", "requests/s", "requests", "good", "share, 95 %", "holds"],
                    rows=[row for arm in arms for row in _rows(book, slo, labels[arm], arm, settings)],
                ),
            ),
        ],
        conditions=conditions(book),
        notes=[DEFINITIONS],
    )


def _between(held: float, failed: float) -> str:
    return f"{held:.3g} to {failed:.3g} requests/s" if failed < math.inf else f"at least {held:.3g} requests/s"


def _curves(book: Book, slo: Slo, labels: dict[str, str], arms: Sequence[str], settings: Settings) -> str:
    curves = {}
    for arm in arms:
        cells = sorted({window.cell for window in book.windows if window.arm == arm}, key=_rate)
        curves[labels[arm]] = [(_rate(cell), 100 * _share(book, arm, cell, slo)[2]) for cell in cells]
    limit = {f"{100 * settings.share:.0f} %": 100 * settings.share}
    shades = (1, 0, *range(2, len(arms)))[: len(curves)]
    return svg.lines(
        curves, x_label="requests/s", y_label="% that meet the SLO", limits=limit, log_x=True, shades=shades
    )


def _rows(book: Book, slo: Slo, label: str, arm: str, settings: Settings) -> list[list[str]]:
    rows = []
    for cell in sorted({window.cell for window in book.windows if window.arm == arm}, key=_rate):
        good, number, share = _share(book, arm, cell, slo)
        low, high = clopper_pearson(good, number)
        rows.append([label, cell.removesuffix("/s"), str(number), str(good), f"{share:.2f} ({low:.2f} to {high:.2f})",
                     "yes" if share >= settings.share else "no"])  # fmt: skip
    return rows
