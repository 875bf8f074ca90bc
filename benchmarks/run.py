"""Run one claim: `python benchmarks/run.py CLAIM [--quick]`, or name them all with `--list`.

A person reads the table; a program reads the last stdout line, one JSON document. Exit codes: 0 the claim holds, 1 it
does not, 2 there is no such claim, or this machine cannot measure it.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the file runs from anywhere, uninstalled

from benchmarks import claims
from benchmarks.support.result import Claim, ClaimResult, Report, is_unavailable, make_report, simple_table

EXIT_HOLDS, EXIT_FAILS, EXIT_USAGE = 0, 1, 2
EXIT_UNABLE = EXIT_USAGE
WIDTH = 140  # of a table that goes into a file


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks/run.py", description="Say whether a claim holds on this machine.")
    parser.add_argument("claim", nargs="?", help="which claim")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: a smoke test, no evidence")
    parser.add_argument("--list", action="store_true", help="name all claims")
    options = parser.parse_args(arguments)
    if options.list:
        return _list()
    if options.claim not in names():
        print(f"There is no claim {options.claim!r}: choose one of {', '.join(names())}.", file=sys.stderr)
        return EXIT_USAGE
    result = find(options.claim).run(options.quick)
    report = make_report(options.claim, result, quick=options.quick)
    show(report, result, Console(width=None if sys.stdout.isatty() else WIDTH))
    print(msgspec.json.encode(report).decode(), flush=True)
    if is_unavailable(result):
        return EXIT_UNABLE
    return EXIT_HOLDS if report.holds else EXIT_FAILS


def names() -> list[str]:
    """Return the name of every claim."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(claims.__path__))


def find(name: str) -> Claim:
    """Return the claim called `name`, which must be one of `names()`."""
    return cast(Claim, importlib.import_module(f"benchmarks.claims.{name.replace('-', '_')}"))


def show(report: Report, result: ClaimResult, console: Console) -> None:
    """Print the table, the verdict and the conditions."""
    shown = result.table or simple_table(report.claim, result)
    table = Table(title=shown.title, title_justify="left")
    for index, column in enumerate(shown.columns):
        table.add_column(column, justify="right" if index else "left")
    for row in shown.rows:
        table.add_row(*row)
    console.print(table)
    bounds = ", ".join(f"{name} {bound}" for name, bound in report.bounds.items())
    console.print(f"{report.claim} {'holds' if report.holds else 'does NOT hold'}: {bounds}", highlight=False)
    conditions = ", ".join(f"{name} {value}" for name, value in report.conditions.items())
    console.print(conditions, style="dim", highlight=False)


def _list() -> int:
    for name in names():
        print(f"{name:<20} {find(name).DESCRIPTION}")
    return EXIT_HOLDS


if __name__ == "__main__":
    sys.exit(main())
