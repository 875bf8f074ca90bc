"""Do concurrent transfers share the link without waste, and in the order that serves TTFT?

1, 8 and 32 equal transfers of computed KV, opened at once, over one shaped link. Taking turns would finish them all
at the end; one after the other finishes the k-th at k times the time of one, so the mean is (n + 1) / 2 times it, and
no order does better. Bounds, against one transfer of the same repetition: total goodput >= 0.95, mean completion
<= 1.1 x (n + 1) / 2, the last one <= 1.1 x n.

Serving the shortest first can starve a long one. So, once per repetition, one long transfer opens into a stream of
short ones that alone take 80 % of the link for four times as long as the long one takes: it must be through within
2.5 times the time that it takes alone (the sender lets newcomers overtake it for about as long as it takes alone),
and the short ones' median is shown.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.support.kv_pair import Copy, KVPair, kv_pair
from benchmarks.support.kv_shape import KVShape
from benchmarks.support.quiet import Quiet
from benchmarks.support.repeat import alternate, spread
from benchmarks.support.result import ClaimResult, Table, unavailable
from tollbridge.bench.netns import LinkUnavailableError, link

DESCRIPTION = "1, 8 and 32 transfers share the link: no goodput lost, shortest remaining first, none starved"

COUNTS = (1, 8, 32)
MIN_TOTAL, MAX_MEAN, MAX_LAST, MAX_LONG = 0.95, 1.1, 1.1, 2.5
SHORT_LOAD, SHORT_SPAN = 0.8, 4.0  # share of the link, and for how long (in times of the long one)
SHORT_PART = 16  # a short transfer has so many times fewer tokens
RATE, BURST = "1gbit", "128kb"  # what the bucket holds passes at once, which must not flatter the single transfer


@dataclass(frozen=True)
class Mixed:
    """A long transfer among short ones, in times of the long one alone."""

    long_ratio: float
    short_median_s: float


def run(quick: bool) -> ClaimResult:
    """Measure at 1 Gb/s; quick runs use transfers a quarter as large."""
    repetitions, quiet = 2 if quick else 7, Quiet()
    shape = KVShape(num_blocks=19, cache_blocks=24) if quick else KVShape(num_blocks=38, cache_blocks=48)
    try:
        with link() as joined, kv_pair(joined, shape) as pair:
            joined.shape(RATE, burst=BURST)
            arms: dict[str, Callable[[], Copy]] = {str(n): partial(pair.kv, count=n) for n in COUNTS}
            copies = alternate(arms, repetitions, before=quiet.wait)
            one_s = statistics.median(copy.seconds for copy in copies["1"])
            mixed = [_mixed(pair, one_s) for _ in range(repetitions)]
    except LinkUnavailableError as error:
        return unavailable(str(error))
    return _verdict(copies, mixed, shape, repetitions, quiet)


def _mixed(pair: KVPair, one_s: float) -> Mixed:
    """Open one long transfer, then short ones at a steady pace; `one_s` is what the long one takes alone."""
    tokens = pair.shape.num_tokens
    interval_s = one_s / SHORT_PART / SHORT_LOAD
    count = int(SHORT_SPAN * one_s / interval_s)
    begin_s = time.monotonic() + 0.1
    at_s = [begin_s, *(begin_s + 0.001 + index * interval_s for index in range(count))]
    done = pair.transfers([tokens] + [tokens // SHORT_PART] * count, at_s=at_s)
    long_s, *short_s = done.each_s.values()
    return Mixed(long_s / one_s, statistics.median(short_s))


def _verdict(
    copies: dict[str, list[Copy]], mixed: list[Mixed], shape: KVShape, repetitions: int, quiet: Quiet
) -> ClaimResult:
    one = copies["1"]
    total: dict[int, list[float]] = {}
    mean: dict[int, list[float]] = {}
    last: dict[int, list[float]] = {}
    for n in COUNTS[1:]:
        pairs = list(zip(copies[str(n)], one, strict=True))
        total[n] = [many.bytes_per_s / alone.bytes_per_s for many, alone in pairs]
        ideal = (n + 1) / 2
        mean[n] = [statistics.mean(many.each_s.values()) / (ideal * alone.seconds) for many, alone in pairs]
        last[n] = [max(many.each_s.values()) / (n * alone.seconds) for many, alone in pairs]
    long = [each.long_ratio for each in mixed]
    figures: dict[str, float] = {"one_median_s": statistics.median(copy.seconds for copy in one)}
    for n in COUNTS[1:]:
        figures[f"total_goodput_ratio_{n}"] = statistics.median(total[n])
        figures[f"mean_completion_ratio_{n}"] = statistics.median(mean[n])
        figures[f"last_completion_ratio_{n}"] = statistics.median(last[n])
    figures["long_among_short_ratio"] = statistics.median(long)
    figures["short_median_s"] = statistics.median(each.short_median_s for each in mixed)
    limits = {"total": (MIN_TOTAL, ">="), "mean": (MAX_MEAN, "<="), "last": (MAX_LAST, "<="), "long": (MAX_LONG, "<=")}
    bounds = {
        name: f"{sign} {limit}" for name in figures for start, (limit, sign) in limits.items() if name.startswith(start)
    }
    holds = all(
        (figures[name] >= float(bound[3:])) if bound.startswith(">=") else (figures[name] <= float(bound[3:]))
        for name, bound in bounds.items()
    )
    rows = [["1", spread([copy.seconds for copy in one]), "1", "1", "1"]]
    rows += [
        [str(n), spread([copy.seconds for copy in copies[str(n)]]), spread(total[n]), spread(mean[n]), spread(last[n])]
        for n in COUNTS[1:]
    ]
    rows.append(["1 long among short", "", "", "", spread(long)])
    return ClaimResult(
        holds=holds,
        figures={**figures, "seconds": {n: [round(copy.seconds, 4) for copy in copies[n]] for n in copies}},
        bounds=bounds,
        conditions={
            "payload": f"each {shape}",
            "link": f"{RATE}, tc tbf, burst {BURST}",
            "repetitions": repetitions,
            "others": str(quiet),
            "short": f"1/{SHORT_PART} of the tokens, {SHORT_LOAD:.0%} of the link for {SHORT_SPAN:g} x the long one",
        },
        table=Table(
            title="Equal transfers opened at once: median (min-max)",
            columns=["transfers", "all through, s", "total / one", "mean / ((n+1)/2 one)", "last / (n one)"],
            rows=rows,
        ),
    )
