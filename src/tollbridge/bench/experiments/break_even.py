"""From which link on is it quicker to fetch a prompt's KV than to compute it? Measured beside what the plan predicts.

Two workers on two hosts (network namespaces; needs root) joined by a link that is shaped to one rate after the other.
At each rate, one request at a time:

    local   decode computes the prompt itself: the same at every rate
    fetch   prefill has the prompt's KV in its cache, decode fetches all of it: what the wire costs, nothing hidden
    split   neither has it: prefill computes while layers leave; what the wire adds to that is the toll

The curves of `fetch` and `local` cross at the break-even link. The plan says it is KV bytes over prefill time, and that
the toll is what layer-wise transfer cannot hide (`cost/toll.py`); both follow from the prefill time measured here.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

import msgspec

from tollbridge.bench import local, schedule
from tollbridge.bench.book import Book
from tollbridge.bench.compare import compare, conditions
from tollbridge.bench.figures import DEFINITIONS, remarks, select
from tollbridge.bench.link import raw_goodput
from tollbridge.bench.local import Local, Started
from tollbridge.bench.netns import ADDRESSES, link, on_host
from tollbridge.bench.records import Arm, LinkRate
from tollbridge.bench.session import Session, Traffic
from tollbridge.bench.stats import percentile
from tollbridge.config.quantity import show_bytes, show_rate, show_seconds
from tollbridge.cost.toll import PIECES_PER_CHUNK, visible_s
from tollbridge.errors import ConfigError
from tollbridge.report import svg
from tollbridge.report.document import Document, Section, Table, Tile

TITLE = "Break-even: fetching a prompt's KV against computing it"
LOCAL, FETCH, SPLIT, PRIME = "local", "fetch", "split", "prime"
_TTFT = "ttft_p50_ms"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured."""

    rates_mbit: tuple[int, ...] = (50, 100, 200, 400, 800)
    """To shape the link to."""
    prompt_tokens: int = 512
    """Of every prompt."""
    repeats: int = 2
    """Requests of a window, one after the other."""
    blocks: int = 3
    """Every arm runs once in each, at each rate."""


@asynccontextmanager
async def start(given: Local, settings: Settings) -> AsyncIterator[Started]:
    """Put p0, the router and this process on host a, d0 on host b."""
    with ExitStack() as stack:
        made = stack.enter_context(link())
        stack.enter_context(on_host(made, "a"))
        hosts = {"p0": ADDRESSES["a"], "d0": ADDRESSES["b"]}
        fleet_of = replace(given, hosts=hosts, prefixes={"d0": made.command("b", [])})
        async with local.started(fleet_of) as fleet:
            found = Started(link=made)
            split = local.arms_of(fleet, [local.SPLIT])[0]
            straight = [
                Arm(name=LOCAL, title="computed by decode", url=fleet.url("d0"), workers=[fleet.url("d0")]),
                Arm(name=PRIME, title="prefill alone", url=fleet.url("p0"), workers=[fleet.url("p0")]),
            ]
            fetch = Arm(name=FETCH, title="fetched from prefill's cache", url=split.url, policy="split", num_workers=2)
            found.add(fleet, [straight[0], fetch, split, straight[1]])
            yield found


async def run(session: Session, settings: Settings) -> None:
    """Run every arm at every rate in every block."""
    shaped = session.options.link
    if shaped is None:
        raise ConfigError("break-even shapes a link between workers of its own: it takes no --arm.")
    for arm in session.arms:
        warm = schedule.fresh([0.0] * 2, settings.prompt_tokens, 2, Random(f"{session.seed} {arm}"), session.vocabulary)
        await session.ask(arm, warm)
    for block in range(settings.blocks):
        for rate in settings.rates_mbit:
            shaped.shape(f"{rate}mbit", burst="64kb", latency="100ms")
            cell = str(rate)
            session.book.link(LinkRate(cell=cell, block=block, bytes_per_s=await raw_goodput(shaped)))
            drawn = _drawer(session, settings, cell, block)
            if not session.book.has(cell, block, FETCH):
                primed = [msgspec.structs.replace(one, max_tokens=1) for one in drawn(FETCH).requests]
                await session.ask(PRIME, primed)
            await session.block(cell, block, drawn, [LOCAL, FETCH, SPLIT])


def _drawer(session: Session, settings: Settings, cell: str, block: int) -> Callable[[str], Traffic]:
    def traffic(arm: str) -> Traffic:
        rng, times = Random(f"{session.seed} {cell} {block} {arm}"), [0.0] * settings.repeats
        return Traffic(
            requests=schedule.fresh(times, settings.prompt_tokens, 2, rng, session.vocabulary), concurrency=1
        )

    return traffic


# ── what is said about it ──


@dataclass(frozen=True, kw_only=True)
class _At:
    """One rate: medians over blocks, seconds and bytes/s."""

    link: float
    local_s: float
    fetch_s: float
    split_s: float


def report(book: Book, settings: Settings, arms: Sequence[str]) -> Document:
    """Return where the curves cross, and where the plan says they do."""
    rows = [_at(book, cell) for cell in sorted({w.cell for w in book.windows}, key=float)]
    num_bytes, _ = select(book.samples, book.windows, arm=SPLIT).wire()
    prefill_s = percentile([row.local_s for row in rows], 50)
    measured = crossing([(row.link, row.fetch_s, row.local_s) for row in rows])
    predicted = num_bytes / prefill_s
    off = f"{100 * (predicted / measured - 1):+.0f} %" if measured else "not crossed in the range"
    return Document(
        title=TITLE,
        headline=f"Fetching is quicker than computing from {show_rate(measured) if measured else '(not crossed)'} on; "
        "the "
        f"plan says {show_rate(predicted)} ({off}).",
        lead=[
            f"{settings.prompt_tokens} tokens, {show_bytes(num_bytes)} of KV, prefill {show_seconds(prefill_s)}; one "
            "request at a time."
        ],
        tiles=[
            Tile(label="Break-even link, measured", value=show_rate(measured) if measured else "-"),
            Tile(label="Break-even link, by the plan", value=show_rate(predicted), note="KV bytes over prefill time"),
        ],
        warnings=remarks(book.samples),
        sections=[
            Section(title="Time to first token over the link", figures=[_curves(rows, num_bytes, prefill_s, measured)]),
            Section(
                title="By rate",
                table=Table(
                    columns=["link, plain socket", "computed", "fetched", "split", "toll", "toll by the plan"],
                    rows=[_cells(row, num_bytes, prefill_s) for row in rows],
                ),
                note="Toll: TTFT split less TTFT computed. The plan's leaves out the second leg's fixed cost and "
                "decode's own "
                "step, which are in what was measured.",
            ),
        ],
        conditions=conditions(book),
        notes=[DEFINITIONS],
    )


def _at(book: Book, cell: str) -> _At:
    compared = compare(book, cell, [LOCAL, FETCH, SPLIT], (_TTFT,))
    middle = {arm: percentile(compared.values[_TTFT, arm], 50) / 1e3 for arm in (LOCAL, FETCH, SPLIT)}
    links = [rate.bytes_per_s for rate in book.links if rate.cell == cell]
    return _At(link=percentile(links, 50), local_s=middle[LOCAL], fetch_s=middle[FETCH], split_s=middle[SPLIT])


def crossing(points: Sequence[tuple[float, float, float]]) -> float | None:
    """Return x where the second value falls below the third, interpolated in logarithms; None where it does not."""
    logs = [(math.log(x), math.log(a / b)) for x, a, b in sorted(points) if x > 0 and a > 0 and b > 0]
    for (x0, y0), (x1, y1) in pairwise(logs):
        if y0 > 0.0 >= y1:
            return math.exp(x0 + (x1 - x0) * y0 / (y0 - y1))
    return None


def _toll_s(num_bytes: float, prefill_s: float, link: float) -> float:
    return visible_s(num_bytes, link, compute_s=prefill_s, num_pieces=PIECES_PER_CHUNK)


def _curves(rows: Sequence[_At], num_bytes: float, prefill_s: float, measured: float | None) -> str:
    curves = {
        "computed by decode": [(row.link / 1e6, row.local_s) for row in rows],
        "fetched from prefill's cache": [(row.link / 1e6, row.fetch_s) for row in rows],
        "split": [(row.link / 1e6, row.split_s) for row in rows],
        "split, by the plan": [(row.link / 1e6, prefill_s + _toll_s(num_bytes, prefill_s, row.link)) for row in rows],
    }
    marks = {"break-even": measured / 1e6} if measured else {}
    return svg.lines(
        curves, x_label="link, MB/s (plain socket)", y_label="TTFT, s", log_x=True, log_y=True, marks=marks
    )


def _cells(row: _At, num_bytes: float, prefill_s: float) -> list[str]:
    return [
        show_rate(row.link),
        show_seconds(row.local_s),
        show_seconds(row.fetch_s),
        show_seconds(row.split_s),
        show_seconds(row.split_s - row.local_s) if row.split_s > row.local_s else "0",
        show_seconds(_toll_s(num_bytes, prefill_s, row.link)),
    ]
