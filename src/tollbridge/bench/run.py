"""A whole run: arms and settings in, records, result and report out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from tollbridge.bench.book import Book
from tollbridge.bench.machine import machine
from tollbridge.bench.outcome import Experiment, write_outcome
from tollbridge.bench.records import Arm, Head
from tollbridge.bench.session import Options, Session, Tell
from tollbridge.errors import ConfigError
from tollbridge.report.document import Document

_MAY_BE_ZERO = {"cv", "warm", "warmup", "steps"}  # besides what is 0 by default


def check_settings(settings: Any) -> None:
    """Raise ConfigError for a number that cannot be meant: negative, infinite, or 0 where there must be something."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        numbers = value if isinstance(value, tuple) else (value,)
        if isinstance(value, str):
            continue
        may_be_zero = field.name in _MAY_BE_ZERO or field.default == 0
        if not numbers or not all(math.isfinite(n) and (n > 0 or (n == 0 and may_be_zero)) for n in numbers):
            option = field.name.replace("_", "-")
            raise ConfigError(f"--{option} {value} cannot be: give {'0 or more' if may_be_zero else 'more than 0'}.")


async def measure(
    experiment: Experiment, arms: Sequence[Arm], settings: Any, out: Path, *, seed: int, options: Options, tell: Tell,
    about: dict[str, object],
) -> tuple[Document, dict[str, Any]]:  # fmt: skip
    """Run `experiment` over `arms`, or what is left of it in `out`; return the report and the result.

    `about` goes into the conditions. ConfigError, UpstreamError when it cannot be run.
    """
    check_settings(settings)
    if len({arm.name for arm in arms}) < len(arms):
        raise ConfigError("Two arms have one name.")
    titles = {arm.name: arm.label for arm in arms}
    head = Head(
        experiment=experiment.name,
        parameters=asdict(settings),
        arms=[arm.name for arm in arms],
        seed=seed,
        conditions={**machine(), **about, "titles": titles},
    )
    book = Book(out / "records.jsonl", head)
    async with Session(book, arms, options, tell) as session:
        await session.settle()
        await experiment.module.run(session, settings)
    return write_outcome(experiment, book, settings, out)
