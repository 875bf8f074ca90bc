"""From the records of a run to its files: report.html, result.json. The records alone suffice to make them again."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tollbridge.bench.book import Book
from tollbridge.bench.compare import compare
from tollbridge.bench.figures import METRICS, Slo, as_vllm, remarks, select
from tollbridge.report.document import Document
from tollbridge.report.page import page


@dataclass(frozen=True)
class Experiment:
    """`module` is one of `experiments`: ARMS (started where none is given), Settings, `run`, `report`, or more."""

    name: str
    module: Any


def write_outcome(experiment: Experiment, book: Book, settings: Any, out: Path) -> tuple[Document, dict[str, Any]]:
    """Write report.html and result.json to `out`, and return both."""
    document = experiment.module.report(book, settings, book.head.arms)
    slo_of = getattr(experiment.module, "slo_of", None)  # of an experiment that asks for one
    result = make_result(book, document, slo_of(settings) if slo_of else None)
    (out / "report.html").write_text(page(document))
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    return document, result


def make_result(book: Book, document: Document, slo: Slo | None = None) -> dict[str, Any]:
    """Return all figures by cell and arm, under vLLM's key names and ours, and the paired ratios."""
    cells: dict[str, Any] = {}
    for cell in dict.fromkeys(window.cell for window in book.windows):
        cells[cell] = _cell(book, cell, slo)
    return {
        "experiment": book.head.experiment,
        "headline": document.headline,
        "parameters": book.head.parameters,
        "plan": book.plan.values if book.plan else {},
        "arms": book.head.arms,
        "seed": book.head.seed,
        "conditions": book.head.conditions,
        "warnings": remarks(book.samples),
        "cells": cells,
    }


def _cell(book: Book, cell: str, slo: Slo | None) -> dict[str, Any]:
    arms = [arm for arm in book.head.arms if any(w.cell == cell and w.arm == arm for w in book.windows)]
    figures: dict[str, Any] = {}
    for arm in arms:
        group = select(book.samples, book.windows, cell=cell, arm=arm)
        ours = {name: _finite(metric(group)) for name, metric in METRICS.items()}
        figures[arm] = as_vllm(group, slo) | ours
    compared = compare(book, cell, arms, list(METRICS))
    ratios = {
        arm: {
            metric: {"ratio": r.mean, "low": _finite(r.low), "high": _finite(r.high), "blocks": r.num_blocks,
                     "claimed": compared.claimed(metric, arm)}
            for metric in METRICS if (r := compared.ratio(metric, arm)) is not None
        }
        for arm in arms[1:]
    }  # fmt: skip
    return {"figures": figures, "over_baseline": ratios}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
