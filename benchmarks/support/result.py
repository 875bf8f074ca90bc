"""What a claim hands back, and the report that the runner makes of it: one JSON document, with its conditions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from tollbridge.bench.machine import machine

_NOT_MEASURED = "not_measured"


@dataclass(frozen=True, kw_only=True)
class Table:
    """What a person looks at."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class ClaimResult:
    """What was measured. Names of figures carry their unit (`help_median_s`); a bound is text such as `<= 0.3`."""

    holds: bool
    figures: Mapping[str, object]
    bounds: Mapping[str, str]  # by the name of the figure
    conditions: Mapping[str, object] = field(default_factory=dict)  # beyond the machine's: model, load, link, seed, ...
    table: Table | None = None  # None: figures and bounds are shown as they are


class Claim(Protocol):
    """A module in `benchmarks/claims`."""

    DESCRIPTION: str

    def run(self, quick: bool) -> ClaimResult: ...


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The last stdout line of a run."""

    claim: str
    holds: bool
    figures: dict[str, object]
    bounds: dict[str, str]
    conditions: dict[str, object]


def make_report(name: str, result: ClaimResult, *, quick: bool) -> Report:
    """Return the report of one run on this machine, now."""
    return Report(
        claim=name,
        holds=result.holds,
        figures=dict(result.figures),
        bounds=dict(result.bounds),
        conditions={**machine(), "quick": quick, **result.conditions},
    )


def simple_table(name: str, result: ClaimResult) -> Table:
    """Return figures and bounds side by side."""
    rows = [[key, _text(value), result.bounds.get(key, "")] for key, value in result.figures.items()]
    return Table(title=name, columns=["figure", "measured", "must be"], rows=rows)


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def unavailable(sentence: str) -> ClaimResult:
    """Return the result of a claim that this machine cannot test: it does not hold, and the sentence says why."""
    return ClaimResult(holds=False, figures={_NOT_MEASURED: sentence}, bounds={_NOT_MEASURED: "absent"})


def is_unavailable(result: ClaimResult) -> bool:
    """Return whether `result` comes from `unavailable`."""
    return _NOT_MEASURED in result.figures
