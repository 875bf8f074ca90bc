"""The simulator against reality: three links, three loads, router and embedded engine in network namespaces.

In this order, each step reading what the one before wrote (`-m benchmarks.claims.sim_accuracy STEP`):

    calibrate    engines and links, unloaded -> benchmarks/accuracy/measured.json
    predict      the simulator -> benchmarks/accuracy/predictions.json; to be committed, for a prediction comes before:
    run          windows, refused otherwise; can be cut and gone on with (--cells 60-mixed-mid --minutes 8)

`python benchmarks/run.py sim-accuracy` runs all windows that are missing and judges, which takes hours; with --quick
it takes all steps for one cell in a scratch folder, a smoke test.

Traffic, SLO and windows are those of decide-quality (benchmarks/quality). None of the judged runs is used for fitting.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy.predict import predicted_records
from benchmarks.quality import cells, judge
from benchmarks.quality.cells import Cell
from benchmarks.quality.drive import Book, Plan, plan_json
from benchmarks.support.result import ClaimResult, Table, unavailable
from tollbridge.bench.netns import LinkUnavailableError, link

DESCRIPTION = "predicted against real TTFT, TPOT, goodput and ranking of policies over three links and three loads"

FOLDER = Path(__file__).parents[1] / "accuracy"
MEASURED, PREDICTIONS = FOLDER / "measured.json", FOLDER / "predictions.json"
OUT = Path("build/sim-accuracy.jsonl")
LINKS, LOADS, PROMPTS = ("10", "60", "200"), ("low", "mid", "high"), "mixed"
ARMS = ("local", "split", "adaptive")
BLOCKS, WINDOW_S = 3, 30.0
QUICK_CELL, QUICK_WINDOW_S = "60-mixed-mid", 15.0
BOUNDS = {"ttft_p50": 0.10, "ttft_p99": 0.20, "tpot_p50": 0.05, "goodput": 0.10}  # relative errors
RANKED = 0.9  # share of the cells whose best arm is to be named

Records = list[dict[str, Any]]


def grid() -> list[Cell]:
    return [Cell(at, PROMPTS, load) for at in LINKS for load in LOADS]


def run(quick: bool) -> ClaimResult:
    """Run what is missing, and judge the predictions."""
    try:
        if not quick:
            collect([cell.name for cell in grid()], minutes=24 * 60)
            return verdict(_read(OUT), json.loads(PREDICTIONS.read_text()))
        return _quick()
    except LinkUnavailableError as error:
        return unavailable(str(error))
    except NotPredictedError as error:
        return unavailable(str(error))


class NotPredictedError(RuntimeError):
    """The predictions are not there, or not committed."""


# --- steps


def calibrate(out: Path = MEASURED, links: Sequence[str] = LINKS, *, quick: bool = False) -> None:
    """Measure engines and links."""
    with link() as made:
        command = [
            sys.executable, "-m", "benchmarks.accuracy.calibrate", made.name, ",".join(links), str(out.absolute()),
            "quick" if quick else "whole",
        ]  # fmt: skip
        subprocess.run(made.command("a", command), check=True, stdout=sys.stderr)


def predict(measured: dict[str, Any], names: Sequence[str], blocks: int, window_s: float) -> dict[str, Any]:
    """Return the predictions of these cells: the records of every request, by cell, arm and block."""
    records = [
        record
        for name in names
        for arm in ARMS
        for block in range(blocks)
        for record in predicted_records(measured, cells.find(name), arm, block, window_s)
    ]
    kept = ("cell", "block", "arm", "slo", "at_s", "ttft_s", "tpot_s", "itl_p99_s", "num_tokens", "error", "choice")
    return {"window_s": window_s, "records": [{name: record[name] for name in kept} for record in records]}


def collect(names: Sequence[str], *, minutes: float, blocks: int = BLOCKS, out: Path = OUT) -> None:
    """Run the windows of these cells that `out` lacks, for about so many minutes."""
    commit = _committed(PREDICTIONS)
    predictions = json.loads(PREDICTIONS.read_text())
    _drive(names, blocks, predictions["window_s"], json.loads(MEASURED.read_text()), out, 60 * minutes)
    with out.open("a") as file:
        digest = hashlib.sha256(PREDICTIONS.read_bytes()).hexdigest()
        file.write(json.dumps({"kind": "predicted", "commit": commit, "sha256": digest}) + "\n")


def _drive(
    names: Sequence[str], blocks: int, window_s: float, measured: dict[str, Any], out: Path, seconds: float
) -> None:
    book = Book(out)
    if book.speed is None:
        book.calibrated(cells.Speed(measured["token_s"], measured["step_s"]))
    with link() as made:
        plan = Plan(
            made.name, list(names), list(ARMS), list(range(blocks)), window_s, str(out.absolute()), seconds
        )  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.quality.drive", plan_json(plan)]
        subprocess.run(made.command("a", command), check=True, stdout=sys.stderr)


def _committed(path: Path) -> str:
    """Return the commit that holds `path` as it is now; NotPredictedError when there is none."""
    if not path.exists():
        raise NotPredictedError(f"{path.name} is missing: calibrate, predict and commit first (see the claim's head).")
    git = ["git", "-C", str(path.parent)]
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--", path.name], capture_output=True, text=True, check=True
    )
    if changed.stdout.strip():
        raise NotPredictedError(f"{path.name} is not committed: predictions must come before the runs.")
    log = subprocess.run(
        [*git, "log", "-1", "--format=%H", "--", path.name], capture_output=True, text=True, check=True
    )
    return log.stdout.strip()


def _quick() -> ClaimResult:
    with tempfile.TemporaryDirectory() as folder:
        measured_file, out = Path(folder) / "measured.json", Path(folder) / "out.jsonl"
        calibrate(measured_file, [QUICK_CELL.partition("-")[0]], quick=True)
        measured = json.loads(measured_file.read_text())
        predictions = predict(measured, [QUICK_CELL], 1, QUICK_WINDOW_S)
        _drive([QUICK_CELL], 1, QUICK_WINDOW_S, measured, out, 150.0)
        return verdict(_read(out), predictions)


def _read(out: Path) -> Records:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


# --- the verdict


def verdict(lines: Records, predictions: dict[str, Any]) -> ClaimResult:
    """Compare cell by cell and arm by arm what both have; a cell is ranked when all arms are there."""
    real = [line for line in lines if line["kind"] == "request"]
    ran = {(line["cell"], line["block"], line["arm"]) for line in lines if line["kind"] == "window"}
    imagined = [r for r in predictions["records"] if (r["cell"], r["block"], r["arm"]) in ran]
    rows: list[list[str]] = []
    errors: dict[str, list[float]] = {kind: [] for kind in BOUNDS}
    of_arms: dict[str, dict[str, list[float]]] = {arm: {kind: [] for kind in BOUNDS} for arm in ARMS}
    ranked: list[bool] = []
    wrong: dict[str, float] = {}
    window_s = predictions["window_s"]
    for cell in sorted({name for name, _, _ in ran}):
        pairs: dict[str, tuple[dict[str, float], dict[str, float]]] = {}
        for arm in ARMS:
            blocks = {block for name, block, of in ran if (name, of) == (cell, arm)}
            if blocks:
                span_s = window_s * len(blocks)
                pairs[arm] = (_figures(imagined, cell, arm, span_s), _figures(real, cell, arm, span_s))
                rows.append(_row(cell, arm, *pairs[arm]))
        for arm, (predicted, happened) in pairs.items():
            for kind in BOUNDS:
                if happened[kind]:
                    error = (predicted[kind] - happened[kind]) / happened[kind]
                    errors[kind].append(abs(error))
                    of_arms[arm][kind].append(error)
        if len(pairs) == len(ARMS):
            regret = _regret(pairs)
            ranked.append(regret == 0.0)
            if regret:
                wrong[cell] = regret
    within = {kind: all(error <= BOUNDS[kind] for error in errors[kind]) for kind in BOUNDS}
    share = sum(ranked) / max(1, len(ranked))
    return ClaimResult(
        holds=bool(ranked) and all(within.values()) and share >= RANKED,
        figures={
            "cells": len(ranked),
            **{f"{kind}_error_median": statistics.median(found) if found else None for kind, found in errors.items()},
            **{f"{kind}_error_worst": max(found, default=None) for kind, found in errors.items()},
            "by_arm": {arm: {kind: _spread(found) for kind, found in kinds.items()} for arm, kinds in of_arms.items()},
            "ranked_right": share,
            "regret_where_wrong": wrong,
        },
        bounds={f"{kind}_error_worst": f"<= {bound}" for kind, bound in BOUNDS.items()}
        | {"ranked_right": f">= {RANKED}"},
        conditions={
            "model": "SmolLM2-135M-Instruct, float32, 46,080 B/token",
            "window_s": window_s,
            "blocks": len({block for _, block, _ in ran}),
            "traffic": "decide-quality's, mixed prompts; load mid is 0.5",
            "predicted": [line["commit"] for line in lines if line["kind"] == "predicted"] or "not committed",
            "definitions": "relative errors, by cell and arm, of p50 and p99 of TTFT, p50 of TPOT, and goodput",
        },
        table=Table(
            title="Predicted / real",
            columns=["cell", "arm", "TTFT p50 (s)", "p99", "TPOT p50 (ms)", "goodput/s", "requests"],
            rows=rows,
        ),
    )


def _spread(errors: Sequence[float]) -> dict[str, float]:
    """Return the medians of relative errors, without and with their sign, and the worst."""
    if not errors:
        return {}
    return {
        "median_error": statistics.median(map(abs, errors)),
        "median_signed": statistics.median(errors),
        "worst": max(errors, key=abs),
    }


def _figures(records: Records, cell: str, arm: str, span_s: float) -> dict[str, float]:
    mine = [record for record in records if (record["cell"], record["arm"]) == (cell, arm)]
    figures = judge.arm_figures([{"gaps_s": [], **record} for record in mine], span_s)
    tpots = [record["tpot_s"] for record in mine if record["tpot_s"] is not None]
    return {
        "ttft_p50": figures.ttft_p50_s,
        "ttft_p99": figures.ttft_p99_s,
        "tpot_p50": statistics.median(tpots) if tpots else 0.0,
        "goodput": figures.goodput_per_s,
        "requests": float(len(mine)),
    }


def _regret(pairs: dict[str, tuple[dict[str, float], dict[str, float]]]) -> float:
    """Return the share of the best goodput that who believes the prediction gives away."""
    chosen = max(pairs, key=lambda arm: pairs[arm][0]["goodput"])
    best = max(happened["goodput"] for _, happened in pairs.values())
    return 1.0 - pairs[chosen][1]["goodput"] / best if best else 0.0


def _row(cell: str, arm: str, predicted: dict[str, float], happened: dict[str, float]) -> list[str]:
    def both(kind: str, factor: float = 1.0) -> str:
        return f"{factor * predicted[kind]:.3g} / {factor * happened[kind]:.3g}"

    return [
        cell, arm, both("ttft_p50"), both("ttft_p99"), both("tpot_p50", 1e3), both("goodput"),
        f"{happened['requests']:.0f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="One step; see the head of the file.")
    parser.add_argument("step", choices=["calibrate", "predict", "run"])
    parser.add_argument("--cells", default=",".join(cell.name for cell in grid()))
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="of `run`: only the first ones")
    parser.add_argument("--minutes", type=float, default=8.0, help="no window begins later")
    options = parser.parse_args()
    if options.step == "calibrate":
        calibrate()
    elif options.step == "predict":
        made = predict(json.loads(MEASURED.read_text()), [cell.name for cell in grid()], BLOCKS, WINDOW_S)
        PREDICTIONS.write_text(json.dumps(made) + "\n")
    else:
        collect(options.cells.split(","), minutes=options.minutes, blocks=options.blocks)


if __name__ == "__main__":
    main()
