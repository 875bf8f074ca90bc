"""Charts as SVG text, without a plotting library: they scale, need no script, and take the page's colours.

Colours are CSS variables with a fallback, so that a chart also stands by itself as a file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]
COLOURS = (
    "var(--c0,#0969da)",
    "var(--c1,#d1495b)",
    "var(--c2,#8250df)",
    "var(--c3,#bf8700)",
    "var(--c4,#2e933c)",
)
_WIDTH = 900
_NARROW = 600  # can be read on a telephone (page.css)
_LEFT, _RIGHT = 62, 16


def colour(at: int) -> str:
    return COLOURS[at % len(COLOURS)]


def stems(
    strips: Sequence[tuple[str, int, Points]], *, y_label: str, x_label: str, marks: Mapping[str, Sequence[float]]
) -> str:
    """Return one strip per (label, colour, points) above each other, on common axes: a vertical line for each point.

    `marks` has, by strip label, the x of events that are drawn as triangles below the axis.
    """
    height, gap, top, bottom = 120, 34, 24, 40
    x_max = max((x for _, _, points in strips for x, _ in points), default=1.0) or 1.0
    y_max = 1.08 * max((y for _, _, points in strips for _, y in points), default=1.0)
    total = top + len(strips) * (height + gap) + bottom - gap + 8
    parts = [_open(total, f"{y_label} by {x_label}")]

    def across(x: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * x / x_max

    for at, (label, shade, points) in enumerate(strips):
        base = top + at * (height + gap) + height
        parts.append(_text(_LEFT, base - height - 7, label, weight=650))
        for value in _ticks(0.0, y_max, 2):
            y = base - height * value / y_max
            parts += [_rule(_LEFT, y, _WIDTH - _RIGHT, y), _text(_LEFT - 6, y + 4, _short(value), "end", soft=True)]
        path = "".join(f"M{across(x):.1f} {base}V{base - height * y / y_max:.1f}" for x, y in points)
        parts.append(f'<path d="{path}" stroke="{colour(shade)}" stroke-width="2.2" fill="none"/>')
        for x in marks.get(label, ()):
            parts.append(f'<path d="M{across(x):.1f} {base + 2}l-5 9h10z" fill="var(--soft,#656d76)"/>')
    end = top + len(strips) * (height + gap) - gap
    for value in _ticks(0.0, x_max, 6):
        parts.append(_text(across(value), end + 26, _short(value), "middle", soft=True))
    parts.append(_text(_WIDTH - _RIGHT, end + 42, x_label, "end", soft=True))
    parts.append(_text(_WIDTH - _RIGHT, top - 7, y_label, "end", soft=True))
    return "".join([*parts, "</svg>"])


def bars(
    items: Sequence[tuple[str, float, str, int]], *, title: str = "", width: int = _NARROW, label_width: int = 230,
    written_width: int = 110,
) -> str:  # fmt: skip
    """Return horizontal bars for (label, value, what is written at its end, colour)."""
    top, step = (30 if title else 6), 34
    parts = [_open(top + step * len(items) + 4, title or ", ".join(label for label, _, _, _ in items), width)]
    if title:
        parts.append(_text(0, 16, title, weight=650))
    room = width - label_width - written_width
    most = max((value for _, value, _, _ in items if math.isfinite(value)), default=1.0) or 1.0
    for at, (label, value, written, shade) in enumerate(items):
        y = top + step * at
        length = room * value / most if math.isfinite(value) else 0.0
        parts += [
            _text(label_width - 10, y + 19, label, "end"),
            f'<rect x="{label_width}" y="{y + 3}" width="{max(2.0, length):.1f}" height="24" rx="3" '
            f'fill="{colour(shade)}"/>',
            _text(label_width + max(2.0, length) + 8, y + 20, written, weight=650),
        ]
    return "".join([*parts, "</svg>"])


Interval = tuple[str, float, float, float, str]  # label, mean, low, high, what is written; a NaN mean: a heading


def intervals(rows: Sequence[Interval], *, left: str = "", right: str = "") -> str:
    """Return ratios with their intervals on a logarithmic axis around 1. `left` and `right` say what the sides mean."""
    top, step, label_width, room = 30, 30, 270, _WIDTH - 270 - 150
    finite = [v for _, mean, low, high, _ in rows for v in (mean, low, high) if 0 < v < math.inf]
    reach = max(abs(math.log(v)) for v in [*finite, 1.25]) * 1.1
    parts = [_open(top + step * len(rows) + 30, f"{left or 'below 1'}, or {right or 'above 1'}")]

    def across(ratio: float) -> float:
        bounded = min(reach, max(-reach, math.log(ratio) if ratio > 0 else -reach))
        return label_width + room * (bounded / reach + 1) / 2

    base = top + step * len(rows)
    for value in _log_ticks(reach):
        parts += [
            _rule(across(value), top - 4, across(value), base),
            _text(across(value), base + 16, f"{value:g}", "middle", soft=True),
        ]
    parts += [
        f'<path d="M{across(1):.1f} {top - 8}V{base}" stroke="var(--ink,#1f2328)" stroke-width="1.5" fill="none"/>',
        _text(across(1) - 10, 14, left, "end", soft=True),
        _text(across(1) + 10, 14, right, "start", soft=True),
    ]
    for at, (label, mean, low, high, written) in enumerate(rows):
        y = top + step * at + 14
        if math.isnan(mean):
            parts.append(_text(0, y + 8, label, weight=650))
            continue
        parts += [
            _text(label_width - 12, y + 4, label, "end"),
            f'<path d="M{across(low):.1f} {y}H{across(high):.1f}" stroke="{colour(0)}" stroke-width="3" fill="none"/>',
            f'<circle cx="{across(mean):.1f}" cy="{y}" r="5.5" fill="{colour(0)}"/>',
            _text(_WIDTH - 140, y + 4, written),
        ]
    return "".join([*parts, "</svg>"])


def lines(
    curves: Mapping[str, Points], *, x_label: str, y_label: str, limits: Mapping[str, float] | None = None,
    log_x: bool = False, log_y: bool = False, marks: Mapping[str, float] | None = None, dots: bool = True,
    width: int = _NARROW, shades: Sequence[int] = (),
) -> str:  # fmt: skip
    """Return curves by label; `limits` are horizontal, `marks` vertical dashed lines. NaN is left out.

    `shades` are the curves' colours, in their order by default.
    """
    limits, marks = limits or {}, marks or {}
    kept = {label: [p for p in points if all(map(math.isfinite, p))] for label, points in curves.items()}
    xs = [x for points in kept.values() for x, _ in points] + list(marks.values())
    ys = [y for points in kept.values() for _, y in points] + list(limits.values())
    right = width - _RIGHT
    shades = shades or range(len(kept))
    legend, rows = _legend(list(kept), y_label, right, shades)
    top, bottom = 16 + 18 * rows, 44
    height = 326 + top
    axis_x, axis_y = _Axis(xs, log_x), _Axis([y * 1.06 for y in ys], log_y)
    base = height - bottom

    def across(x: float) -> float:
        return _LEFT + (right - _LEFT) * axis_x.share(x)

    def up(y: float) -> float:
        return base - (base - top) * axis_y.share(y)

    parts = [_open(height, f"{y_label} by {x_label}", width), *legend]
    for value in axis_y.ticks():
        parts += [
            _rule(_LEFT, up(value), right, up(value)),
            _text(_LEFT - 6, up(value) + 4, _short(value), "end", soft=True),
        ]
    for value in axis_x.ticks(most=width // 90):
        parts.append(_text(across(value), base + 18, _short(value), "middle", soft=True))
    for label, value in limits.items():
        parts += [_dashed(_LEFT, up(value), right, up(value)), _text(right, up(value) - 5, label, "end")]
    for label, value in marks.items():
        parts += [
            _dashed(across(value), top, across(value), base),
            _beside(across(value), top + 12, label, width),
        ]
    for at, points in enumerate(kept.values()):
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
        shade = colour(shades[at])
        parts.append(f'<polyline points="{path}" fill="none" stroke="{shade}" stroke-width="2.2"/>')
        if dots:
            parts += [f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="4" fill="{shade}"/>' for x, y in points]
    parts.append(_text(right, height - 6, x_label, "end", soft=True))
    return "".join([*parts, "</svg>"])


def _legend(labels: Sequence[str], y_label: str, right: float, shades: Sequence[int]) -> tuple[list[str], int]:
    """Return the legend with the name of the y axis at its right, and its rows: as many as the labels need."""
    parts, x, row = [_text(right, 15, y_label, "end", soft=True)], float(_LEFT), 0
    for label, shade in zip(labels, shades, strict=True):
        needed = 34 + 7.2 * len(label)
        if x + needed > right - (7.2 * len(y_label) if row == 0 else 0.0) and (x > _LEFT or row == 0):
            x, row = float(_LEFT), row + 1
        y = 18 * row
        parts.append(f'<rect x="{x:.0f}" y="{y + 4}" width="12" height="12" rx="2" fill="{colour(shade)}"/>')
        parts.append(_text(x + 18, y + 15, label))
        x += needed
    return parts, row + 1


class _Axis:
    """From values to shares of the drawing's room."""

    def __init__(self, values: Sequence[float], log: bool) -> None:
        positive = [v for v in values if v > 0] or [1.0]
        self._log = log
        self._high = max(values, default=1.0) or 1.0
        self._low = min(positive) if log else min(0.0, min(values, default=0.0))
        if self._high <= self._low:
            self._high = self._low * 2 if log else self._low + 1.0

    def share(self, value: float) -> float:
        if self._log:
            return math.log(max(value, self._low) / self._low) / math.log(self._high / self._low)
        return (value - self._low) / (self._high - self._low)

    def ticks(self, most: int = 10) -> list[float]:
        """Return round values; on a logarithmic axis powers of ten alone where more would be more than `most`."""
        if not self._log:
            return _ticks(self._low, self._high, min(5, most))
        first, last = math.floor(math.log10(self._low)), math.ceil(math.log10(self._high))
        every = [m * 10.0**e for e in range(first, last + 1) for m in (1, 2, 5)]
        shown = [value for value in every if self._low <= value <= self._high]
        return shown if len(shown) <= most else [value for value in shown if f"{value:.0e}"[0] == "1"]


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Return round values in [low, high], about so many."""
    raw = (high - low) / about
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(m for m in (1, 2, 5, 10) if m * scale >= raw) * scale
    first = math.ceil(low / step)
    return [step * n for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(reach: float) -> list[float]:
    steps = (1, 1.1, 1.25, 1.5, 2, 3, 5, 10, 20, 50, 100, 1000)
    most = math.exp(reach)
    fitting = [step for step in steps if step <= most]
    chosen = fitting if len(fitting) <= 4 else [1, fitting[len(fitting) // 2], fitting[-1]]
    return sorted({*chosen, *(float(f"{1 / step:.2g}") for step in chosen)})


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == round(value) else f"{value:.3g}"


def _open(height: float, label: str, width: int = _WIDTH) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" role="img" '
        f'aria-label="{escape(label)}" '
        'font-family="system-ui,sans-serif" font-size="13">'
    )


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="var(--line,#d0d7de)" fill="none"/>'


def _dashed(x1: float, y1: float, x2: float, y2: float) -> str:
    return _rule(x1, y1, x2, y2).replace("var(--line,#d0d7de)", 'var(--ink,#1f2328)" stroke-dasharray="6 4')


def _beside(x: float, y: float, text: str, width: int) -> str:
    """Return text on that side of a vertical line on which it has room."""
    fits = x + 5 + 7.2 * len(text) <= width
    return _text(x + 5, y, text) if fits else _text(x - 5, y, text, "end")


def _text(x: float, y: float, text: str, anchor: str = "start", *, weight: int = 400, soft: bool = False) -> str:
    kind = ' class="soft"' if soft else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}"{kind}>{escape(text)}</text>'
