"""Results of the simulator for the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tollbridge.sim.results import PolicyResult
from tollbridge.sim.run import Comparison
from tollbridge.sim.search import Search

_ROWS: tuple[tuple[str, Callable[[PolicyResult], str]], ...] = (
    ("goodput/s", lambda r: f"{r.goodput_per_s:.3g}"),
    ("  per GPU", lambda r: f"{r.goodput_per_gpu_s:.3g}"),
    ("within SLO", lambda r: f"{r.good:.1%}"),
    ("TTFT p50", lambda r: _time(r.ttft_s.p50)),
    ("     p99", lambda r: _time(r.ttft_s.p99)),
    ("TPOT p50", lambda r: _time(r.tpot_s.p50)),
    ("     p99", lambda r: _time(r.tpot_s.p99)),
    ("ITL p50", lambda r: _time(r.itl_s.p50)),
    ("    p99", lambda r: _time(r.itl_s.p99)),
    ("output tokens/s", lambda r: f"{r.output_tokens_per_s:,.0f}"),
    ("split", lambda r: f"{r.num_split / max(1, r.num_requests):.0%}"),
    ("prefix hits", lambda r: f"{r.hit_ratio:.0%}"),
    ("on the wire", lambda r: _size(r.wire_bytes)),
    ("preemptions", lambda r: f"{r.preemptions:,}"),
    ("retried, failed", lambda r: f"{r.num_retries:,}, {r.num_failed:,}"),
)


def render(made: Comparison) -> RenderableType:
    """Return what `rich` prints: one column for each policy, the best goodput in bold."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    best = max(made.policies, key=lambda each: each.goodput_per_s)
    for result in made.policies:
        table.add_column(result.policy, justify="right", style="bold" if result is best else None)
    for name, show in _ROWS:
        table.add_row(name, *map(show, made.policies))
    head = (
        f"{made.num_requests:,} requests, {made.prompt_tokens:,} prompt and {made.output_tokens:,} output tokens, "
        f"on {made.num_workers} workers; seed {made.seed}"
    )
    return Group(Text(head), table, Text(made.definitions, style="dim"))


def render_search(made: Search) -> RenderableType:
    """Return what `rich` prints of a search: the best first, and who is no worse for sure."""
    table = Table(box=box.SIMPLE_HEAD)
    for index, name in enumerate(("placement", "requests/s per GPU", "95 %", "behind the best by")):
        table.add_column(name, justify="right" if index else "left")
    for at, found in enumerate(made.found):
        behind = "" if not at else f"{_signed(found.behind_low)} to {_signed(found.behind_high)}"
        note = "" if found.is_worse or not at else " (not told apart)"
        style = "bold" if not at else None
        table.add_row(
            found.name, f"{found.mean:.3g}", f"{found.low:.3g} to {found.high:.3g}", behind + note, style=style
        )
    head = (
        f"Highest rate at which {made.target:.0%} of the requests meet their SLO, {made.num_gpus} GPUs, "
        f"{len(made.seeds)} seeds"
    )
    return Group(Text(head), table)


def _time(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    return f"{seconds:.3g} s" if seconds >= 1.0 else f"{seconds * 1e3:.3g} ms"


def _size(num_bytes: float) -> str:
    units = ("B", "kB", "MB", "GB", "TB", "PB")
    at = min(len(units) - 1, int(math.log10(num_bytes) / 3)) if num_bytes >= 1 else 0
    return f"{num_bytes / 1000**at:.3g} {units[at]}"


def _signed(number: float) -> str:
    return f"{number:.2g}"
