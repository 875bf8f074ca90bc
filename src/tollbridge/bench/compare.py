"""Arms against the first of them, block by block, with its A/A noise floor; and how reports say it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tollbridge.bench import stats
from tollbridge.bench.book import Book
from tollbridge.bench.figures import METRICS, Group, by_block
from tollbridge.bench.stats import Difference, Ratio
from tollbridge.report import svg
from tollbridge.report.document import Section, Table, Tile

AGAIN = "-again"  # ends the name of the baseline's second run, which is served in the same way
NAMES: Mapping[str, str] = {
    "ttft_p50_ms": "TTFT p50",
    "ttft_p99_ms": "TTFT p99",
    "itl_p50_ms": "ITL p50",
    "itl_p90_ms": "ITL p90",
    "itl_p99_ms": "ITL p99",
    "itl_max_ms": "longest gap",
    "steady_itl_p50_ms": "ITL p50 of the streams",
    "steady_itl_p90_ms": "ITL p90 of the streams",
    "steady_itl_p99_ms": "ITL p99 of the streams",
    "steady_itl_max_ms": "longest gap of the streams",
    "tpot_p50_ms": "TPOT p50",
    "e2e_p50_ms": "E2E p50",
    "requests_per_s": "requests/s",
    "tokens_per_s": "tokens/s",
    "tokens_per_s_per_worker": "tokens/s per worker",
    "send_lag_p99_ms": "send lag p99 of the client",
    "cached_share": "prompt tokens cached or loaded, share",
    "kv_mb_per_split": "KV on the wire, MB a split",
    "wire_p50_ms": "first to last KV byte, p50",
    "joules_per_token": "energy, J a token",
    "queue_mean_ms": "mean wait in the engine's queue",
}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Values by (metric, arm), one a block."""

    arms: Sequence[str]
    labels: Mapping[str, str]
    metrics: Sequence[str]
    values: Mapping[tuple[str, str], Sequence[float]]

    @property
    def baseline(self) -> str:
        return self.arms[0]

    @property
    def again(self) -> str | None:
        """The A/A arm, None where there is none."""
        return next((arm for arm in self.arms if arm == self.baseline + AGAIN), None)

    @property
    def main(self) -> str:
        """The arm that the run is about: the last."""
        return self.arms[-1]

    @property
    def others(self) -> list[str]:
        return [arm for arm in self.arms if arm not in (self.baseline, self.again, self.main)]

    @property
    def num_blocks(self) -> int:
        return min((len(values) for values in self.values.values()), default=0)

    def label(self, arm: str) -> str:
        return self.labels[arm]

    def shade(self, arm: str) -> int:
        """Return the arm's colour, the same in all charts."""
        return {self.baseline: 1, self.main: 0}.get(arm, (3, 2, 4)[self.arms.index(arm) % 3 - 2])

    def pair(self) -> str:
        return f"{self.label(self.baseline)} and {self.label(self.main)}"

    def ratio(self, metric: str, arm: str, to: str | None = None) -> Ratio | None:
        """Return arm over baseline (or over `to`), paired by block; None where it cannot be told."""
        return stats.paired_ratio(*self._pair(metric, arm, to))

    def difference(self, metric: str, arm: str, to: str | None = None) -> Difference | None:
        return stats.paired_difference(*self._pair(metric, arm, to))

    def floor(self, metric: str) -> float:
        """Return the factor within which two runs of the baseline differ; 1 without an A/A arm."""
        return stats.noise_floor(self.ratio(metric, self.again)) if self.again else 1.0

    def claimed(self, metric: str, arm: str) -> bool:
        """Return whether a difference to the baseline may be claimed."""
        return stats.claims(self.ratio(metric, arm), self.floor(metric))

    def _pair(self, metric: str, arm: str, to: str | None) -> tuple[Sequence[float], Sequence[float]]:
        ours, theirs = self.values[metric, arm], self.values[metric, to or self.baseline]
        number = min(len(ours), len(theirs))  # a run that was cut off has an incomplete last block
        return ours[:number], theirs[:number]

    # ── how it is said ──

    def tile(self, metric: str, label: str, unit: str, *, lower_is_better: bool) -> Tile:
        """Return the medians over blocks of baseline and main arm side by side."""
        before, after = (_median(self.values[metric, arm]) for arm in (self.baseline, self.main))
        ratio = self.ratio(metric, self.main)
        better = ratio is not None and (ratio.mean < 1) is lower_is_better
        claimed = self.claimed(metric, self.main)
        return Tile(
            label=label,
            value=f"{_number(before)} → {_number(after)} {unit}",
            note=f"{self.label(self.baseline)} → {self.label(self.main)}; "
            + (f"{in_interval(ratio)}" if ratio else "not comparable")
            + ("" if claimed else ", no difference claimed"),
            tone=("good" if better else "bad") if claimed else "plain",
        )

    def section(self, title: str = "Paired comparison") -> Section:
        """Return every ratio with its interval."""
        rows: list[svg.Interval] = []
        table: list[list[str]] = []
        for metric in self.metrics:
            rows.append((NAMES[metric], math.nan, math.nan, math.nan, ""))
            for arm in self.arms[1:]:
                ratio = self.ratio(metric, arm)
                if ratio is None:
                    continue
                claimed, floor = self.claimed(metric, arm), f"{self.floor(metric):.3f}" if self.again else "-"
                label = f"{NAMES[metric]}, {self.label(arm)}"
                rows.append(
                    (
                        self.label(arm),
                        ratio.mean,
                        ratio.low,
                        ratio.high,
                        f"x {ratio.mean:.2f}{'' if claimed else ' (n.s.)'}",
                    )
                )
                table.append([label, f"{ratio.mean:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}",
                              floor, "yes" if claimed else "no"])  # fmt: skip
        return Section(
            title=title,
            text=f"Each arm over {self.label(self.baseline)} in the same block: geometric mean over {self.num_blocks} "
            "blocks and 95 % interval (n.s.: no difference may be claimed).",
            figures=[svg.intervals(rows, left="less", right="more")] if rows else [],
            table=Table(columns=["over the baseline", "ratio", "95 % interval", "A/A floor", "claimed"], rows=table),
        )


def compare(
    book: Book, cell: str, arms: Sequence[str], metrics: Sequence[str], labels: Mapping[str, str] | None = None
) -> Comparison:
    """Return the comparison of `arms` at a cell; the first is the baseline."""
    values = {
        (metric, arm): by_block(book.samples, book.windows, metric, cell=cell, arm=arm)
        for metric in metrics
        for arm in arms
    }
    return Comparison(arms=arms, labels=labels or labels_of(book, arms), metrics=metrics, values=values)


def labels_of(book: Book, arms: Sequence[str]) -> dict[str, str]:
    """Return what arms are called, as the head of the run has it."""
    titles = book.head.conditions.get("titles")
    known = titles if isinstance(titles, dict) else {}
    return {arm: str(known.get(arm, arm)) for arm in arms}


def spread_table(
    title: str, groups: Mapping[str, Group], arms: Sequence[str], labels: Mapping[str, str], metrics: Sequence[str]
) -> Section:
    """Return a table of metrics by arm, pooled over the blocks of each group."""
    rows = [[NAMES[metric], *(_cell(metric, METRICS[metric](groups[arm])) for arm in arms)] for metric in metrics]
    counts = ["requests", *(str(len(groups[arm].requests)) for arm in arms)]
    failed = ["of them failed", *(str(sum(not s.ok for s in groups[arm].requests)) for arm in arms)]
    return Section(title=title, table=Table(columns=["", *(labels[arm] for arm in arms)], rows=[*rows, counts, failed]))


def conditions(book: Book) -> dict[str, str]:
    """Return what it takes to repeat the run, for the foot of a report."""
    head = book.head
    given = {key: str(value) for key, value in head.conditions.items() if key != "titles"}
    parameters = ", ".join(f"{key} {value}" for key, value in head.parameters.items())
    return {**given, "parameters": parameters, "seed": str(head.seed)}


def in_words(compared: Comparison) -> str:
    """Return how the comparison was made."""
    again = (
        f"{compared.label(compared.baseline)} ran twice in each block (A/A): what differs by less than "
        "those two is not claimed."
        if compared.again
        else "There was no A/A arm: the noise floor is not known."
    )
    return (
        f"Randomised complete blocks: in each of {compared.num_blocks} blocks all arms get prompts of the same lengths "
        "at the same times, in an order drawn anew. A ratio is taken within each block; its interval is Student's t "
        f"over blocks. {again}"
    )


def said(ratio: Ratio | None) -> str:
    """Return a ratio as a headline may say it: only where it is one."""
    if ratio is None:
        return "not comparable"
    return f"x {ratio.mean:.2f}" if stats.claims(ratio) else "no difference claimed"


def in_interval(ratio: Ratio) -> str:
    return f"x {ratio.mean:.2f}, 95 % {ratio.low:.2f} to {ratio.high:.2f}"


def _cell(metric: str, value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{_number(value)} ms" if metric.endswith("_ms") else _number(value)


def _median(values: Sequence[float]) -> float:
    return stats.percentile(values, 50)


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
