"""A document on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table as RichTable

from tollbridge.report.document import Document, Section


def show(document: Document, console: Console) -> None:
    """Print what a person needs: headline, tiles, tables, warnings. Figures are in the page."""
    console.print(f"\n[bold]{_plain(document.headline)}", highlight=False)
    for sentence in document.lead:
        console.print(sentence, highlight=False, markup=False)
    for tile in document.tiles:
        colour = {"good": "green", "bad": "red"}.get(tile.tone, "default")
        console.print(
            f"  {_plain(tile.label)}: [bold {colour}]{_plain(tile.value)}[/]  [dim]{_plain(tile.note)}", highlight=False
        )
    for section in document.sections:
        _table(section, console)
    for warning in document.warnings:
        console.print(f"[yellow]! {_plain(warning)}", highlight=False)


def _table(section: Section, console: Console) -> None:
    if section.table is None:
        return
    table = RichTable(title=section.title, title_justify="left")
    for at, column in enumerate(section.table.columns):
        table.add_column(column, justify="right" if at else "left")
    for row in section.table.rows:
        table.add_row(*map(_plain, row))
    console.print(table)


def _plain(text: str) -> str:
    """Return `text` so that rich takes none of it for markup."""
    return text.replace("[", r"\[")
