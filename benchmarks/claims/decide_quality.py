"""Does pricing each request pay? The same traffic under five policies, over links from 10 Mb/s to unshaped.

Two embedded workers in float32, one core and one network namespace each (p0 in a, d0 in b; router and client in a),
the link between them shaped by tc. Cells, seeds, SLO and noise rule: benchmarks/quality/cells.py, committed before
the runs. Results are kept per window, so a run can be cut and gone on with:

    python -m benchmarks.claims.decide_quality --cells 60-mixed-high,60-long-high --minutes 8 --out results.jsonl
    python benchmarks/run.py decide-quality            # what is missing, then the verdict; hours
    python benchmarks/run.py decide-quality --quick    # the four corner cells, one short block: a smoke test
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality import cells, judge
from benchmarks.quality.drive import Plan, plan_json
from benchmarks.support.result import ClaimResult, Table, unavailable
from tollbridge.bench.netns import LinkUnavailableError, link

DESCRIPTION = "adaptive against local, split and the rules of others: goodput in every cell of links, prompts, loads"

OUT = Path("build/decide-quality.jsonl")
WINDOW_S, QUICK_WINDOW_S = 30.0, 12.0
WHOLE_RUN_S = 24 * 3600.0


def run(quick: bool) -> ClaimResult:
    """Run what is missing, and return the claim's verdict."""
    try:
        if not quick:
            collect([cell.name for cell in cells.grid()], out=OUT, minutes=WHOLE_RUN_S / 60)
            return verdict(OUT)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "quick.jsonl"
            _drive(list(cells.CORNERS), list(cells.QUICK_ARMS), [0], QUICK_WINDOW_S, out, 240.0)
            return verdict(out)
    except LinkUnavailableError as error:
        return unavailable(str(error))


def collect(
    names: list[str],
    *,
    out: Path,
    minutes: float,
    blocks: Sequence[int] = range(cells.BLOCKS),
    arms: Sequence[str] = cells.ARMS,
) -> None:
    """Run the windows of these cells that `out` lacks, for about so many minutes."""
    _drive(names, list(arms), list(blocks), WINDOW_S, out, 60 * minutes)


def _drive(names: list[str], arms: list[str], blocks: list[int], window_s: float, out: Path, seconds: float) -> None:
    with link() as made:
        plan = Plan(made.name, names, arms, blocks, window_s, str(out.absolute()), seconds)
        command = [sys.executable, "-m", "benchmarks.quality.drive", plan_json(plan)]
        subprocess.run(made.command("a", command), check=True, stdout=sys.stderr)


def verdict(out: Path) -> ClaimResult:
    """Judge what `out` holds; a cell without a block of adaptive, local and split does not count."""
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    requests = [line for line in lines if line["kind"] == "request"]
    windows = [line for line in lines if line["kind"] == "window"]
    figures: dict[str, object] = {}
    rows, lost, gained = [], [], []
    means: dict[str, float] = {}
    for cell in cells.grid():
        records = [r for r in requests if r["cell"] == cell.name]
        found = judge.against_best(records)
        if found is None:
            continue
        best, ratio = found
        means[cell.name] = ratio.mean
        if ratio.high < cells.FLOOR:
            lost.append(cell.name)
        if cell.prompts == "mixed" and ratio.mean >= cells.GAIN and ratio.low > 1.0:
            gained.append(cell.name)
        arms = {arm: _arm(records, windows, cell.name, arm) for arm in cells.ARMS}
        figures[cell.name] = {
            "best": best,
            "ratio": [ratio.mean, ratio.low, ratio.high],
            **{arm: vars(figure) for arm, figure in arms.items() if figure is not None},
        }
        rows.append(_row(cell.name, best, ratio, arms))
    mixed = [cell.name for cell in cells.grid() if cell.prompts == "mixed" and cell.name in figures]
    return ClaimResult(
        holds=bool(means) and not lost and len(gained) == len(mixed),
        figures={
            "cells_judged": len(means),
            "cells_lost": lost,
            "mixed_cells_won": gained,
            **_overall(means),
            **figures,
        },
        bounds={"cells_lost": "none: no interval of adaptive / best below 0.95", "mixed_cells_won": f"all of {mixed}"},
        conditions=_conditions(windows),
        table=Table(
            title="Goodput (requests/s within SLO); then adaptive's TTFT p50/p99, ITL p99 (s), tokens/s, share split",
            columns=["cell", *cells.ARMS, "adaptive / best (95 %)", "TTFT", "ITL", "tok/s", "split"],
            rows=rows,
        ),
    )


def _overall(means: dict[str, float]) -> dict[str, object]:
    kinds = {"every_cell": "", **{f"{load}_load": f"-{load}" for load in cells.LOADS}}
    ratios = {
        kind: judge.over_cells([m for name, m in means.items() if name.endswith(end)]) for kind, end in kinds.items()
    }
    return {kind: [ratio.mean, ratio.low, ratio.high] for kind, ratio in ratios.items() if ratio is not None}


def _arm(records: Sequence[Any], windows: Sequence[Any], cell: str, arm: str) -> judge.Arm | None:
    mine = [w for w in windows if (w["cell"], w["arm"]) == (cell, arm)]
    if not mine:
        return None
    return judge.arm_figures([r for r in records if r["arm"] == arm], sum(w["window_s"] for w in mine))


def _row(cell: str, best: str, ratio: judge.Ratio, arms: dict[str, judge.Arm | None]) -> list[str]:
    goodputs = [f"{figure.goodput_per_s:.2f}" if figure else "-" for figure in arms.values()]
    own = arms["adaptive"]
    assert own is not None, "against_best found it"
    return [
        cell,
        *goodputs,
        f"{ratio.mean:.2f} of {best} ({ratio.low:.2f}-{ratio.high:.2f})",
        f"{own.ttft_p50_s:.2f}/{own.ttft_p99_s:.2f}",
        f"{own.itl_p99_s:.2f}",
        f"{own.tokens_per_s:.0f}",
        f"{own.split:.0%}",
    ]


def _conditions(windows: Sequence[Any]) -> dict[str, object]:
    speeds = sorted({round(1 / w["token_s"]) for w in windows})
    slos = sorted({tuple(w["slo"]) for w in windows})
    return {
        "model": "SmolLM2-135M-Instruct (Q4_1 weights, dequantised), float32, 46,080 B/token",
        "slo": [f"TTFT {t:.2f} s, TPOT {p:.3f} s, p99 of a request's gaps {g:.3f} s: all three" for t, p, g in slos],
        "prompt_tokens_per_s": speeds,
        "window_s": sorted({w["window_s"] for w in windows}),
        "blocks": len({w["block"] for w in windows}),
        "seed": cells.SEED,
        "cores": "p0 on core 0, d0 on core 1, router and client on both",
        "definitions": "TTFT: first token - request sent; TPOT: (latency - TTFT)/(tokens - 1); ITL: every gap, pooled; "
        "goodput: requests/s that meet the SLO, a failed one missed",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Run some cells; what is in the file already is kept.")
    parser.add_argument("--cells", default=",".join(cell.name for cell in cells.grid()))
    parser.add_argument("--arms", default=",".join(cells.ARMS))
    parser.add_argument("--blocks", type=int, default=cells.BLOCKS, help="how many")
    parser.add_argument("--first-block", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=8.0, help="no window begins later")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    blocks = range(options.first_block, options.first_block + options.blocks)
    names, arms = options.cells.split(","), options.arms.split(",")
    collect(names, out=options.out, minutes=options.minutes, blocks=blocks, arms=arms)


if __name__ == "__main__":
    main()
