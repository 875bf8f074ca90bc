"""A document as one HTML file: no script, nothing loaded from elsewhere, light and dark."""

from __future__ import annotations

from html import escape
from importlib.resources import files

from tollbridge.report.document import Document, Section, Table, Tile

_STYLE = files("tollbridge.report").joinpath("page.css")


def page(document: Document) -> str:
    """Return the HTML."""
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(document.title)}</title><style>{_STYLE.read_text()}</style></head><body>",
        f'<header><p class="title">{escape(document.title)}</p><h1>{escape(document.headline)}</h1>',
        *(f'<p class="lead">{escape(sentence)}</p>' for sentence in document.lead),
        "</header><main>",
        *(f'<p class="warning">{escape(sentence)}</p>' for sentence in document.warnings),
        '<div class="tiles">' + "".join(map(_tile, document.tiles)) + "</div>" if document.tiles else "",
        *map(_section, document.sections),
        "</main>",
        _conditions(document),
        "</body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def _tile(tile: Tile) -> str:
    return (
        f'<div class="tile {tile.tone}"><p class="label">{escape(tile.label)}</p><p class="value">{escape(tile.value)}'
        f'</p><p class="note">{escape(tile.note)}</p></div>'
    )


def _section(section: Section) -> str:
    parts = [f"<section><h2>{escape(section.title)}</h2>"]
    if section.text:
        parts.append(f"<p>{escape(section.text)}</p>")
    parts.append(_figures(section))
    if section.table is not None:
        parts.append(_table(section.table, section.title))
    if section.points:
        parts.append("<ul>" + "".join(f"<li>{escape(point)}</li>" for point in section.points) + "</ul>")
    if section.note:
        parts.append(f'<p class="note">{escape(section.note)}</p>')
    return "".join([*parts, "</section>"])


def _figures(section: Section) -> str:
    figures = "".join(f"<figure>{figure}</figure>" for figure in section.figures)
    return f'<div class="pair">{figures}</div>' if section.side_by_side else figures


def _table(table: Table, title: str) -> str:
    """Return the table; each cell also names its column, for screens too narrow for columns (page.css)."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = "".join(
        f"<tr{' class=best' if at in table.best else ''}>"
        + "".join(
            f'<td data-column="{escape(column)}"><span>{escape(cell)}</span></td>'
            for column, cell in zip(table.columns, row, strict=True)
        )
        + "</tr>"
        for at, row in enumerate(table.rows)
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(title)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _conditions(document: Document) -> str:
    rows = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in document.conditions.items())
    notes = "".join(f"<p>{escape(note)}</p>" for note in document.notes)
    terms = f"<dl>{rows}</dl>" if rows else ""
    return f"<footer><h2>{escape(document.footer)}</h2>{notes}{terms}</footer>"
