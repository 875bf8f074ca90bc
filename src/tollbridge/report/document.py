"""What a report says, before it looks like anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Tone = Literal["good", "bad", "plain"]


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One figure that a reader should see first."""

    label: str
    value: str
    note: str = ""
    tone: Tone = "plain"


@dataclass(frozen=True, kw_only=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: Sequence[int] = ()  # rows to emphasise


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading with what belongs under it, in this order."""

    title: str
    text: str = ""
    figures: Sequence[str] = ()  # SVG
    side_by_side: bool = False  # the figures, where there is room
    table: Table | None = None
    points: Sequence[str] = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Document:
    """A whole report."""

    title: str
    headline: str  # one sentence: the answer
    lead: Sequence[str] = ()  # the sentences after it
    tiles: Sequence[Tile] = ()
    sections: Sequence[Section] = ()
    warnings: Sequence[str] = ()
    conditions: dict[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    footer: str = "How it was measured"  # the heading over notes and conditions
