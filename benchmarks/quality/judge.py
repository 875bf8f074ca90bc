"""From the records of requests to goodput, and to what the noise rule says of a cell. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}  # two-sided

Record = Mapping[str, Any]


def is_good(record: Record) -> bool:
    """Return whether a request met all SLOs; one that failed did not."""
    if record["error"] or record["ttft_s"] is None:
        return False
    ttft_s, tpot_s, itl_p99_s = record["slo"]
    late = record["ttft_s"] > ttft_s or (record["tpot_s"] or 0.0) > tpot_s
    return not late and (record["itl_p99_s"] or 0.0) <= itl_p99_s


@dataclass(frozen=True)
class Arm:
    """One policy in one cell, all blocks together."""

    num_requests: int
    good: float  # share
    goodput_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p99_s: float
    tokens_per_s: float
    split: float  # share
    errors: int


@dataclass(frozen=True)
class Ratio:
    """A paired ratio over blocks, with its 95 % interval."""

    mean: float
    low: float
    high: float


def arm_figures(records: Sequence[Record], window_s: float) -> Arm:
    """Return the figures of one arm; `window_s` is the sum of its windows."""
    ttfts = [r["ttft_s"] for r in records if r["ttft_s"] is not None] or [math.nan]
    gaps = [gap for r in records for gap in r["gaps_s"]] or [math.nan]
    good = sum(map(is_good, records))
    return Arm(
        num_requests=len(records),
        good=good / max(1, len(records)),
        goodput_per_s=good / window_s,
        ttft_p50_s=float(np.percentile(ttfts, 50)),
        ttft_p99_s=float(np.percentile(ttfts, 99)),
        itl_p99_s=float(np.percentile(gaps, 99)),
        tokens_per_s=sum(r["num_tokens"] for r in records) / window_s,
        split=sum(r["choice"] == "split" for r in records) / max(1, len(records)),
        errors=sum(bool(r["error"]) for r in records),
    )


def paired(above: Sequence[int], below: Sequence[int]) -> Ratio:
    """Return the ratio of good requests per block, one half added to each."""
    logs = [math.log((a + 0.5) / (b + 0.5)) for a, b in zip(above, below, strict=True)]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Ratio(math.exp(mean), 0.0, math.inf)
    half = _T95.get(len(logs) - 1, 1.96) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def over_cells(means: Sequence[float]) -> Ratio | None:
    """Return the geometric mean of cells' ratios with its 95 % interval over cells; None of nothing.

    Each is to the better of two arms as they came out, so chance in those counts against it.
    """
    logs = [math.log(mean) for mean in means]
    if len(logs) < 2:
        return None
    mean, half = statistics.fmean(logs), _T95.get(len(logs) - 1, 2.0) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def good_by_block(records: Iterable[Record], arm: str) -> dict[int, int]:
    """Return the good requests of an arm by block."""
    good: dict[int, int] = {}
    for record in records:
        if record["arm"] == arm:
            good[record["block"]] = good.get(record["block"], 0) + is_good(record)
    return good


def against_best(records: Sequence[Record]) -> tuple[str, Ratio] | None:
    """Return which of local and split is better in a cell, and adaptive's ratio to it; None without common blocks."""
    good = {arm: good_by_block(records, arm) for arm in ("adaptive", "local", "split")}
    blocks = sorted(set.intersection(*(set(by_block) for by_block in good.values())))
    if not blocks:
        return None
    totals = {arm: sum(good[arm][b] for b in blocks) for arm in ("local", "split")}
    best = max(totals, key=lambda arm: totals[arm])
    return best, paired([good["adaptive"][b] for b in blocks], [good[best][b] for b in blocks])
