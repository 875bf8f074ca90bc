"""A plan as one HTML file: the verdict in a sentence, the figures that decide it, two plots per link, all terms."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tollbridge.config.quantity import show_bytes, show_rate, show_seconds
from tollbridge.plan.plan import Length, OnLink, Plan
from tollbridge.plan.terms import Terms
from tollbridge.plan.text import break_even_text, interval, kv_text, memory_text, ratio_text
from tollbridge.report import page as report
from tollbridge.report import svg
from tollbridge.report.document import Document, Section, Table, Tile, Tone

GIGABIT = 1e9 / 8
MAX_CURVES = len(svg.COLOURS)
CHART_WIDTH = 470  # two of them fit beside each other, one on a telephone
_TONES: dict[str, Tone] = {"do not split": "bad", "split": "good"}
_COLUMNS = (
    "prompt",
    "KV",
    "wire",
    "toll",
    "TTFT unsplit",
    "TTFT split",
    "gap unsplit",
    "gap split",
    "pays from",
    "verdict",
)
_NOTABLE = 1.05  # of the TTFT without a split: less is not a loss that anybody sees
_AFTERWARDS = "split, sent afterwards"
_EXPLAINED = (
    "Toll: seconds that a split adds to TTFT. TTFT unsplit is prefill alone, without queues.",
    "Longest gap: between two tokens of the streams that decode beside such a prefill.",
    "A verdict weighs the toll against the time that others' tokens would stand still, by the ratio of their SLOs.",
)


def page(plan: Plan) -> str:
    """Return the HTML; it loads nothing and needs no package."""
    return report.page(document(plan))


def document(plan: Plan) -> Document:
    """Return what the page says."""
    return Document(
        title=f"Tollbridge plan: {plan.kv.model_type} in {plan.kv.dtype}",
        headline=_headline(plan.links),
        lead=_lead(plan.links),
        tiles=_tiles(plan),
        sections=[*map(_section, plan.links), *_sizes(plan)],
        notes=[*(f"Assumed: {sentence}" for sentence in plan.assumed), *(_EXPLAINED if plan.links else ())],
        footer="What this rests on",
    )


def _headline(links: Sequence[OnLink]) -> str:
    answers = [link.verdict.answer.capitalize() for link in links]
    if not links:
        return "No verdict yet: it needs the speed of an engine and of a link."
    if len(links) == 1:
        return f"{answers[0]} on {links[0].link.name}."
    if len(set(answers)) == 1:
        return f"{answers[0]}, on {'either' if len(links) == 2 else 'any'} of these links."
    return f"{'; '.join(f'{answer} on {link.link.name}' for answer, link in zip(answers, links, strict=True))}."


def _lead(links: Sequence[OnLink]) -> list[str]:
    """Return the reason for each link's verdict."""
    if not links:
        return ["Give --prefill-per-token, --gpu or --calibration for the engine, and --goodput for the link."]
    if len(links) == 1:
        return [links[0].verdict.why]
    return [f"{link.link.name[:1].upper()}{link.link.name[1:]}: {link.verdict.why}" for link in links]


def _tiles(plan: Plan) -> list[Tile]:
    """Return the figures behind one link's verdict, or the verdict of each link."""
    if len(plan.links) == 1:
        return _figures(plan.links[0])
    return [
        Tile(
            label=link.link.name,
            value=link.verdict.answer.capitalize(),
            note=_short(link),
            tone=_TONES.get(link.verdict.answer, "plain"),
        )
        for link in plan.links
    ]


def _figures(link: OnLink) -> list[Tile]:
    """Return what a split of the longest prompt costs and buys, and the link that it would take."""
    longest = link.lengths[-1]
    terms, flips = longest.terms, link.verdict.flips_at_bytes_per_s or longest.verdict.flips_at_bytes_per_s
    tokens = f"{terms.prompt_tokens:,} tokens"
    longer = terms.ttft_split_s[1] / terms.ttft_local_s
    return [
        Tile(
            label=f"TTFT at {tokens}",
            value=f"{show_seconds(terms.ttft_local_s)} → {show_seconds(terms.ttft_split_s[1])}",
            note=f"what a split costs: {longer:.3g} times as long",
            tone="bad" if longer > _NOTABLE else "plain",
        ),
        Tile(
            label="Longest gap between others' tokens",
            value=f"{show_seconds(terms.gap_s)} → {show_seconds(terms.gap_split_s)}",
            note="what a split buys",
            tone="good",
        ),
        Tile(
            label="A split pays from",
            value=_bits(flips) if flips else "no link",
            note=f"yours carries {_bits(link.link.low)}",
        ),
    ]


def _short(link: OnLink) -> str:
    terms = link.lengths[-1].terms
    return (
        f"TTFT at {terms.prompt_tokens:,} tokens {show_seconds(terms.ttft_local_s)} → {interval(terms.ttft_split_s)}; "
        f"the link carries {_bits(link.link.low)}"
    )


def _bits(bytes_per_s: float) -> str:
    """Return the rate as links are sold: "4.95 Gb/s"."""
    return show_rate(bytes_per_s).split(" (")[1].rstrip(")")


def _section(link: OnLink) -> Section:
    note = f"Break-even, where the wire keeps up with prefill: {break_even_text(link)}."
    return Section(
        title=f"On {link.link.name}, by prompt length",
        figures=[_ttft_chart(link), _wire_chart(link)],
        side_by_side=True,
        table=Table(columns=_COLUMNS, rows=[_row(length) for length in link.lengths]),
        points=[f"{length.terms.prompt_tokens:,} tokens: {length.verdict.why}" for length in link.lengths],
        note=f"{note} {ratio_text(link.ratio)}" if link.ratio else note,
    )


def _row(length: Length) -> list[str]:
    terms, flips = length.terms, length.verdict.flips_at_bytes_per_s
    return [
        f"{terms.prompt_tokens:,}",
        show_bytes(terms.kv_bytes),
        interval(terms.wire_s),
        interval(terms.toll_s),
        show_seconds(terms.ttft_local_s),
        interval(terms.ttft_split_s),
        show_seconds(terms.gap_s),
        show_seconds(terms.gap_split_s),
        _bits(flips) if flips else "no link",
        length.verdict.answer,
    ]


def _sizes(plan: Plan) -> list[Section]:
    sections = [Section(title="KV cache", text=kv_text(plan.kv))]
    if plan.memory is not None:
        sections.append(Section(title="Memory", text=memory_text(plan.memory).plain))
    return sections


def _ttft_chart(link: OnLink) -> str:
    """Return TTFT by length: unsplit, split, and split by a transport that waits for the end of prefill."""
    ways: dict[str, list[tuple[float, float]]] = {"not split": [], "split, sent while computed": [], _AFTERWARDS: []}
    for terms in (length.terms for length in link.lengths):
        times_s = (terms.ttft_local_s, terms.ttft_split_s[1], terms.prefill_s + terms.toll_sequential_s[1])
        for points, time_s in zip(ways.values(), times_s, strict=True):
            points.append((terms.prompt_tokens, time_s))
    if len(link.lengths) == 1:
        bars = [(way, points[0][1], show_seconds(points[0][1]), at) for at, (way, points) in enumerate(ways.items())]
        return svg.bars(bars, title="TTFT", width=CHART_WIDTH, label_width=195, written_width=75)
    ways["not split"].insert(0, (0.0, 0.0))
    return svg.lines(ways, x_label="prompt tokens", y_label="TTFT, s", width=CHART_WIDTH)


def _wire_chart(link: OnLink) -> str:
    """Return how much of the wire prefill cannot hide, by the speed of the link."""
    lowest = min(link.link.low, link.break_even_bytes_per_s[0]) / 4
    steps = math.ceil(8 * math.log2(4 * max(link.link.high, link.break_even_bytes_per_s[1]) / lowest))
    rates = [lowest * 2 ** (step / 8) for step in range(steps + 1)]
    curves = {
        f"{terms.prompt_tokens:,} tokens": [
            (rate / GIGABIT, max(terms.kv_bytes / rate - terms.prefill_s, 0.0)) for rate in rates
        ]
        for terms in _spread([length.terms for length in link.lengths])
    }
    return svg.lines(
        curves,
        x_label="link, Gb/s",
        y_label="wire that shows, s",
        log_x=True,
        dots=False,
        marks={"your link": link.link.low / GIGABIT},
        width=CHART_WIDTH,
    )


def _spread(items: Sequence[Terms]) -> list[Terms]:
    """Return at most as many as there are colours, first and last among them."""
    if len(items) <= MAX_CURVES:
        return list(items)
    return [items[round(at * (len(items) - 1) / (MAX_CURVES - 1))] for at in range(MAX_CURVES)]
