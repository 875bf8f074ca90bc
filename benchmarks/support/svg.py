"""A line chart as a small SVG file, without a plotting library: axes, a legend, horizontal limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 360, 70, 20, 50, 50
_COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#edae49", "#6a4c93")

Points = Sequence[tuple[float, float]]


def line_chart(
    title: str, x_label: str, y_label: str, lines: Mapping[str, Points], limits: Mapping[str, float] | None = None
) -> str:
    """Return the SVG text of `lines` (points by label) and `limits` (dashed, by label)."""
    limits = limits or {}
    x_max = max((x for points in lines.values() for x, _ in points), default=1.0) or 1.0
    y_max = 1.1 * max([*(y for points in lines.values() for _, y in points), *limits.values()], default=1.0)

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return _LEFT + across * x / x_max, _HEIGHT - _BOTTOM - up * max(0.0, y) / y_max

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_WIDTH / 2, 18, title, "middle", 14),
        _text(_WIDTH / 2, _HEIGHT - 12, x_label, "middle"),
        _text(8, _TOP - 8, y_label, "start"),
    ]
    for step in range(5):
        x, y = place(x_max * step / 4, y_max * step / 4)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{y_max * step / 4:.3g}", "end"))
        parts.append(_text(x, _HEIGHT - _BOTTOM + 16, f"{x_max * step / 4:.3g}", "middle"))
    for label, value in limits.items():
        _, y = place(0, value)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#333" stroke-dasharray="6 4"/>')
        parts.append(_text(_WIDTH - _RIGHT - 4, y - 5, label, "end"))
    for index, (label, points) in enumerate(lines.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(_text(_LEFT + 140 * index, 36, label, "start", 12, colour))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str, size: int = 12, colour: str = "#333") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{escape(text)}</text>'
    )
