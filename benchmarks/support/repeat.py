"""Repetitions whose arms alternate, and what is said of them: medians, spread, and ratios within a repetition."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

Value = TypeVar("Value")


def _go() -> None:
    """Begin at once."""


def alternate(
    arms: Mapping[str, Callable[[], Value]], repetitions: int, *, before: Callable[[], None] = _go
) -> dict[str, list[Value]]:
    """Run every arm once per repetition, in an order that rotates; return the results by arm.

    `before` is called before each repetition.
    """
    names = list(arms)
    results: dict[str, list[Value]] = {name: [] for name in names}
    for repetition in range(repetitions):
        before()
        turn = repetition % len(names)
        for name in names[turn:] + names[:turn]:
            results[name].append(arms[name]())
    return results


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Return the ratio of each repetition."""
    return [above / below for above, below in zip(numerators, denominators, strict=True)]


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return `median (min-max)`."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"
