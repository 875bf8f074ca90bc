"""A document as a page and on a terminal: nothing from elsewhere, nothing unescaped, charts that are well-formed."""

from __future__ import annotations

import io
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from rich.console import Console

from tollbridge.report import svg
from tollbridge.report.document import Document, Section, Table, Tile
from tollbridge.report.page import page
from tollbridge.report.text import show

CHARTS = {
    "stems": svg.stems([("a <b>", 0, [(0.1, 5.0), (2.0, 900.0)]), ("c", 1, [])], y_label="ms", x_label="s", marks={}),
    "bars": svg.bars([("a", 3.0, "3 ms", 0), ("b", math.nan, "-", 1)], title="t & u"),
    "intervals": svg.intervals(
        [("h", math.nan, 1, 1, ""), ("a", 0.5, 0.4, 0.6, "x"), ("b", 2.0, 0.0, math.inf, "y")],
        left="less",
        right="more",
    ),
    "lines": svg.lines({"a": [(1, 1), (10, 5), (20, math.nan)], "b": []}, x_label="x", y_label="y", limits={"SLO": 4}),
    "logs": svg.lines(
        {"a": [(1e6, 0.1), (1e9, 30)]}, x_label="x", y_label="y", log_x=True, log_y=True, marks={"a b c": 9e8, "d": 1e7}
    ),
    "one point": svg.lines({"a": [(5, 0)]}, x_label="x", y_label="y"),
}
DOCUMENT = Document(
    title="T",
    headline="A <script> is not run",
    lead=["[bold] is text"],
    tiles=[Tile(label="l", value="1 → 2", note="n", tone="good")],
    sections=[Section(title="s", figures=list(CHARTS.values()), table=Table(columns=["a"], rows=[["<x>"]]))],
    warnings=["careful [/]"],
    conditions={"seed": "1"},
)


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_is_well_formed_and_inside_its_frame(name: str) -> None:
    root = ElementTree.fromstring(CHARTS[name])
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    assert "nan" not in CHARTS[name] and "inf" not in re.sub("info?", "", CHARTS[name])
    for mark in root.iter("{http://www.w3.org/2000/svg}circle"):
        assert -1 <= float(mark.attrib["cx"]) <= width + 1 and 0 <= float(mark.attrib["cy"]) <= height


def test_the_name_of_a_line_at_the_edge_is_on_its_inner_side() -> None:
    drawn = {
        text.text: text for text in ElementTree.fromstring(CHARTS["logs"]).iter("{http://www.w3.org/2000/svg}text")
    }
    assert (drawn["a b c"].attrib["text-anchor"], drawn["d"].attrib["text-anchor"]) == ("end", "start")


def test_a_page_loads_nothing_and_escapes_everything() -> None:
    html = page(DOCUMENT)
    assert "<script" not in html and "A &lt;script&gt; is not run" in html and "&lt;x&gt;" in html
    assert not re.search(r"(src|href)=|@import|url\(", html)


def test_a_terminal_shows_brackets_as_they_are() -> None:
    out = io.StringIO()
    show(DOCUMENT, Console(file=out, width=100))
    text = out.getvalue()
    assert "[bold] is text" in text and "careful [/]" in text and "1 → 2" in text
