"""A link report for the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tollbridge.config.quantity import show_rate
from tollbridge.probe.link import WAYS, LinkReport, LinkSample
from tollbridge.probe.link_verdict import rtt_sentence, verdict


def render(report: LinkReport, here: str, there: str) -> RenderableType:
    """Return what `rich` prints: a line per case, and a sentence per direction."""
    names = {"up": (here, there), "down": (there, here)}
    sentences = [Text(verdict(report, way, *names[way])) for way in WAYS]
    notes = [Text(note, style="yellow") for note in report.notes]
    return Group(_table(report, names), Text(rtt_sentence(report)), *sentences, *notes)


def _table(report: LinkReport, names: dict[str, tuple[str, str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("case")
    for name in ("plain sockets", "our transfer", "share"):
        table.add_column(name, justify="right")
    cases: dict[tuple[str, bool, int], dict[str, LinkSample]] = {}
    for sample in report.samples:
        streams = 0 if sample.loaded else sample.streams
        cases.setdefault((sample.way, sample.loaded, streams), {})[sample.how] = sample
    for (way, loaded, streams), by_how in cases.items():
        case = f"{' to '.join(names[way])}, " + ("beside a flow" if loaded else f"{streams} streams")
        raw, transfer = by_how.get("raw"), by_how.get("transfer")
        share = f"{100 * transfer.bytes_per_s / raw.bytes_per_s:.0f} %" if raw and transfer else ""
        table.add_row(case, *(show_rate(one.bytes_per_s) if one else "" for one in (raw, transfer)), share)
    return table
