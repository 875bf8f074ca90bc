"""Do long prompts stop the tokens of those who are already reading? And what does it cost to keep them flowing?

Steady streams decode for the whole window while long prompts arrive one after the other. In each block every arm runs
once, on prompts of the same lengths at the same moments. The local arms:

    one         one worker does both                                   (the baseline, once more as the A/A pair)
    both        two workers behind the router, policy local: each does both; the same hardware as the split
    split       prefill on one worker, its KV shipped, decode on the other
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from tollbridge.bench import schedule
from tollbridge.bench.book import Book
from tollbridge.bench.compare import Comparison, compare, conditions, in_words, said, spread_table
from tollbridge.bench.figures import DEFINITIONS, METRICS, Group, remarks, select
from tollbridge.bench.load import STEADY
from tollbridge.bench.records import Planned, Sample
from tollbridge.bench.session import Budget, Session, Traffic
from tollbridge.bench.stats import percentile
from tollbridge.report import svg
from tollbridge.report.document import Document, Section, Tile

TITLE = "Interference: tokens of running streams while long prompts arrive"
CELL = "interference"
ARMS = ("one", "one-again", "both", "split")
STEADY_PROMPT, STEADY_OUTPUT = 32, 4000
TARGET_PREFILL_S = 0.9  # the long prompt is made so long that an idle worker takes about this for it
MIN_LONG, MAX_LONG, ROUND_TO = 64, 8192, 64


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured."""

    streams: int = 4
    """Streams that decode all the time."""
    long_tokens: int = 0
    """Length of the prompts that arrive; 0: what takes an idle worker about a second."""
    long_output: int = 2
    """Tokens generated for each of them."""
    arrivals: int = 2
    """Prompts in a window."""
    load: float = 0.55
    """Share of one worker's time that their prefill takes."""
    blocks: int = 5
    """Every arm runs once in each."""
    budget_s: float = 135.0
    """No block begins that would end later than so long after the first; three are run in any case."""


async def run(session: Session, settings: Settings) -> None:
    """Warm up, measure how long a prefill takes, then run the blocks."""
    plan = await session.plan(lambda: calibrate(session, settings))
    budget = Budget(settings.budget_s)
    for block in range(settings.blocks):
        if not budget.allows(block):
            session.tell(
                f"{block} of {settings.blocks} blocks in {settings.budget_s:g} s: this machine is slow or busy"
            )
            break
        await session.block(CELL, block, lambda arm: traffic(settings, plan, session, block, arm))  # noqa: B023


async def calibrate(session: Session, settings: Settings) -> dict[str, float]:
    """Return the length of the long prompts, and the seconds between two."""
    rng = Random(f"{session.seed} calibration")
    arm = next(iter(session.arms))
    first = settings.long_tokens or 256
    for name in session.arms:
        await session.ask(name, schedule.fresh([0.0, 0.0], first, 4, rng, session.vocabulary))
    length = settings.long_tokens or _length(session, await _prefill_s(session, arm, first, rng), first)
    took_s = await _prefill_s(session, arm, length, rng)
    session.tell(f"a prompt of {length} tokens takes {took_s:.2f} s, one comes every {took_s / settings.load:.2f} s")
    return {"long_tokens": length, "prefill_s": took_s, "interval_s": took_s / settings.load}


def _length(session: Session, took_s: float, num_tokens: int) -> int:
    length = num_tokens * TARGET_PREFILL_S / max(took_s, 1e-4)
    most = min(MAX_LONG, session.max_model_len - ROUND_TO)
    return min(most, max(MIN_LONG, round(length / ROUND_TO) * ROUND_TO))


async def _prefill_s(session: Session, arm: str, num_tokens: int, rng: Random) -> float:
    samples = await session.ask(arm, schedule.fresh([0.0] * 2, num_tokens, 1, rng, session.vocabulary))
    return statistics.median(sample.ttft_s or 0.0 for sample in samples)


def traffic(settings: Settings, plan: Mapping[str, float], session: Session, block: int, arm: str) -> Traffic:
    """Return the steady streams and the arrivals of one window."""
    rng, ids = Random(f"{session.seed} {block} {arm}"), session.vocabulary
    jitter = Random(f"{session.seed} {block} times")
    interval_s = plan["interval_s"]
    times = [(at + 0.25 + 0.2 * jitter.random()) * interval_s for at in range(settings.arrivals)]
    output = min(STEADY_OUTPUT, session.max_model_len - STEADY_PROMPT - 1)
    steady = [
        Planned(at_s=0.0, prompt=schedule.draw(STEADY_PROMPT, rng, ids), max_tokens=output, group=STEADY)
        for _ in range(settings.streams)
    ]
    long = schedule.fresh(times, round(plan["long_tokens"]), settings.long_output, rng, ids)
    return Traffic(requests=[*steady, *long], duration_s=settings.arrivals * interval_s)


# ── what is said about it ──

_GAP, _TTFT, _TOKENS = "steady_itl_p99_ms", "ttft_p50_ms", "tokens_per_s"
_ROWS = (
    "steady_itl_p50_ms", "steady_itl_p90_ms", _GAP, "steady_itl_max_ms", _TTFT, "ttft_p99_ms", _TOKENS,
    "tokens_per_s_per_worker", "send_lag_p99_ms",
)  # fmt: skip


def report(book: Book, settings: Settings, arms: Sequence[str]) -> Document:
    """Return what the windows show."""
    groups = {arm: select(book.samples, book.windows, cell=CELL, arm=arm) for arm in arms}
    compared = compare(book, CELL, arms, (_GAP, _TTFT, _TOKENS, "tokens_per_s_per_worker"))
    shown = [arm for arm in arms if arm != compared.again]
    plan = book.plan.values if book.plan else {}
    labels = compared.labels
    return Document(
        title=TITLE,
        headline=_headline(compared),
        lead=_lead(compared, settings, plan),
        tiles=_tiles(compared),
        warnings=remarks(book.samples),
        sections=[
            Section(
                title="Every gap between two tokens, in one window",
                text=f"Each line is one wait between two tokens of the {settings.streams} streams; its height is how "
                "long the reader waited. A triangle is a long prompt arriving.",
                figures=[_strips(groups, shown, compared)],
            ),
            Section(
                title="What is bought, and what it costs",
                figures=[
                    _bars(compared, shown, _GAP, "Longest waits between tokens (ITL p99): shorter is better"),
                    _bars(
                        compared,
                        shown,
                        _TTFT,
                        "First token of a long prompt (TTFT p50): shorter is better",
                    ),
                    _bars(compared, shown, _TOKENS, "Tokens per second, all workers together: more is better", "tok/s"),
                ],
            ),
            compared.section(),
            spread_table("All figures, pooled over blocks", groups, arms, labels, _ROWS),
        ],
        conditions={
            "long prompts": f"{plan.get('long_tokens', 0):.0f} tokens, prefill alone {plan.get('prefill_s', 0):.2f} s, "
            f"one every {plan.get('interval_s', 0):.2f} s, {settings.arrivals} in a window",
            "streams": f"{settings.streams}, prompts of {STEADY_PROMPT} tokens",
            **conditions(book),
        },
        notes=[DEFINITIONS, in_words(compared)],
    )


def _headline(compared: Comparison) -> str:
    gap, ttft = compared.ratio(_GAP, compared.main), compared.ratio(_TTFT, compared.main)
    if gap is None or ttft is None:
        return "Too many requests failed for an answer: see below."
    if not compared.claimed(_GAP, compared.main):
        return f"No difference in the gaps between tokens can be claimed between {compared.pair()}."
    main = compared.label(compared.main)
    change = f"{1 / gap.mean:.1f} times shorter" if gap.mean < 1 else f"{gap.mean:.1f} times longer"
    price = "no difference in TTFT can be claimed"
    if compared.claimed(_TTFT, compared.main):
        price = f"the price: long prompts wait {ttft.mean:.2f} times as long for their first token"
        if ttft.mean < 1:
            price = f"and long prompts wait only {ttft.mean:.2f} of the time for their first token"
    return f"{main[0].upper()}{main[1:]}: the longest waits between tokens are {change}; {price}."


def _lead(compared: Comparison, settings: Settings, plan: Mapping[str, float]) -> list[str]:
    fair = compared.others
    lines = [
        f"{settings.streams} streams decode while a prompt of {plan.get('long_tokens', 0):.0f} tokens arrives every "
        f"{plan.get('interval_s', 0):.1f} s. Compared with {compared.label(compared.baseline)}."
    ]
    for arm in fair:
        gap, tokens = compared.ratio(_GAP, compared.main, arm), compared.ratio(_TOKENS, compared.main, arm)
        if gap and tokens:
            told = f"p99 of the gaps {said(gap)}, tokens per second {said(tokens)}"
            lines.append(f"Against {compared.label(arm)}: {told}.")
    return lines


def _tiles(compared: Comparison) -> list[Tile]:
    return [
        compared.tile(_GAP, "Longest waits between tokens (p99)", "ms", lower_is_better=True),
        compared.tile(_TTFT, "First token of a long prompt (p50)", "ms", lower_is_better=True),
        compared.tile("tokens_per_s_per_worker", "Tokens per second and worker", "tok/s", lower_is_better=False),
    ]


def _strips(groups: Mapping[str, Group], arms: Sequence[str], compared: Comparison) -> str:
    """Draw the block whose worst gap in the baseline is the median one: neither the best nor the worst picture."""
    block = _typical_block(groups[arms[0]])
    strips, marks = [], {}
    for arm in arms:
        group = groups[arm]
        end_s = max((w.duration_s for w in group.windows if w.block == block), default=0.0)
        mine = [s for s in group.samples if s.block == block and not s.failure]
        points = [point for s in mine if s.group == STEADY for point in _waits(s, end_s)]
        strips.append((compared.label(arm), compared.shade(arm), points))
        marks[compared.label(arm)] = [s.sent_s for s in mine if s.group != STEADY]
    return svg.stems(strips, y_label="wait for a token, ms", x_label="seconds into the window", marks=marks)


def _typical_block(group: Group) -> int:
    worst = {
        w.block: METRICS["steady_itl_max_ms"](select(group.samples, group.windows, block=w.block))
        for w in group.windows
    }
    ranked = sorted(worst, key=lambda block: worst[block])
    return ranked[len(ranked) // 2] if ranked else 0


def _waits(sample: Sample, end_s: float) -> list[tuple[float, float]]:
    at_s, points = sample.sent_s + (sample.ttft_s or 0.0), []
    for gap in sample.gaps_s:
        at_s += gap
        if 0.0 <= at_s < end_s:
            points.append((at_s, 1e3 * gap))
    return points


def _bars(compared: Comparison, arms: Sequence[str], metric: str, title: str, unit: str = "ms") -> str:
    """Draw the median over blocks."""
    values = [(arm, percentile(compared.values[metric, arm], 50)) for arm in arms]
    items = [(compared.label(arm), value, f"{value:,.0f} {unit}", compared.shade(arm)) for arm, value in values]
    return svg.bars(items, title=title)
