"""Goodput of the transfer beside its rivals at several rates: what `transfer-goodput` and `transfer-busy` share."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from benchmarks.support import nixl_pair
from benchmarks.support.iperf import available as iperf_available
from benchmarks.support.iperf import iperf
from benchmarks.support.kv_pair import Copy, KVPair, kv_pair
from benchmarks.support.kv_shape import KVShape
from benchmarks.support.nixl_pair import NixlPair
from benchmarks.support.repeat import alternate, ratios, spread
from tollbridge.bench.netns import Link

RATES: dict[str, str | None] = {"1 Gb/s": "1gbit", "4.6 Gb/s": "4600mbit", "unshaped": None}
MULTI_STREAMS = (2, 4, 8)
OURS = "tollbridge"
VARIANTS: dict[str, dict[str, object]] = {
    OURS: {},
    "tollbridge, 1 stream": {"streams": 1},
    "tollbridge, threads": {"io": "threads"},
}


@dataclass(frozen=True, kw_only=True)
class RateResult:
    """The copies of every arm at one rate, by arm, in the order of the repetitions."""

    rate: str
    copies: dict[str, list[Copy]]

    def bytes_per_s(self, arm: str) -> list[float]:
        return [copy.bytes_per_s for copy in self.copies[arm]]

    def ratio(self, arm: str, rivals: Sequence[str]) -> float | None:
        """Return the median, over repetitions, of `arm` to the best of those `rivals` that ran; None without one."""
        columns = [self.bytes_per_s(rival) for rival in rivals if rival in self.copies]
        if not columns:
            return None
        best = [max(column) for column in zip(*columns, strict=True)]
        return statistics.median(ratios(self.bytes_per_s(arm), best))

    def rows(self) -> list[list[str]]:
        """Return table rows: rate, arm, MiB/s, ratio to the raw stream, CPU of either side."""
        raw = self.bytes_per_s("raw")
        return [
            [
                self.rate,
                arm,
                spread([copy.bytes_per_s / 2**20 for copy in copies], 0),
                spread(ratios(self.bytes_per_s(arm), raw)),
                *(_cpu(copies, side) for side in ("send_cpu_s", "receive_cpu_s")),
            ]
            for arm, copies in self.copies.items()
        ]


COLUMNS = ("link", "arm", "MiB/s", "of raw", "send CPU s/GB", "receive CPU s/GB")


@contextmanager
def variants(joined: Link, shape: KVShape) -> Iterator[dict[str, KVPair]]:
    """Start a pair of workers for each of VARIANTS."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(kv_pair(joined, shape, options)) for name, options in VARIANTS.items()}


def measure(
    joined: Link,
    pairs: Mapping[str, KVPair],
    nixl: NixlPair | None,
    repetitions: int,
    *,
    multi: bool,
    rates: Sequence[str],
    before: Callable[[], None],
) -> list[RateResult]:
    """Measure all arms at each of `rates`; the multi-stream rivals only when asked for, and only unshaped.

    `pairs` has one pair for each of VARIANTS; `before` is called before each repetition.
    """
    results, pair = [], pairs[OURS]
    for rate in rates:
        joined.shape(RATES[rate])
        arms: dict[str, Callable[[], Copy]] = {
            "raw": pair.raw,
            **{name: variant.kv for name, variant in pairs.items()},
            "tollbridge, neighbours": lambda: pair.kv(pair.contiguous),
        }
        if nixl is not None:
            arms |= {"NIXL WRITE": nixl.write, "NIXL READ": nixl.read}
        if multi and rate == "unshaped":
            arms |= _multi_stream(joined, pair)
        results.append(RateResult(rate=rate, copies=alternate(arms, repetitions, before=before)))
    return results


def figures(results: Sequence[RateResult]) -> dict[str, object]:
    """Return every arm's goodput, and its ratio to the raw stream, by rate and arm."""
    return {
        f"{result.rate}, {arm}": {
            "goodput_median_mib_per_s": statistics.median(result.bytes_per_s(arm)) / 2**20,
            "goodput_mib_per_s": [round(value / 2**20, 1) for value in result.bytes_per_s(arm)],
            "ratio_to_raw_median": result.ratio(arm, ["raw"]),
            "send_cpu_s_per_gb": _per_gb(copies, "send_cpu_s"),
            "receive_cpu_s_per_gb": _per_gb(copies, "receive_cpu_s"),
        }
        for result in results
        for arm, copies in result.copies.items()
    }


def multi_stream_arms() -> list[str]:
    """Return the names of the multi-stream rivals; the first of them, without streams, is the plain one."""
    return ["raw", *(f"raw x{n}" for n in MULTI_STREAMS), *(f"iperf3 -P {n}" for n in (1, *MULTI_STREAMS))]


def missing(nixl: NixlPair | None, *, multi: bool) -> list[str]:
    """Return a sentence for every rival that is not there."""
    sentences = [] if nixl is not None else [nixl_pair.MISSING]
    if multi and not iperf_available():
        sentences.append("iperf3 is missing: apt-get install iperf3; the multi-stream rival is Python threads only")
    return sentences


def _multi_stream(joined: Link, pair: KVPair) -> dict[str, Callable[[], Copy]]:
    def threads(streams: int) -> Callable[[], Copy]:
        return lambda: pair.raw(streams)

    def program(streams: int) -> Callable[[], Copy]:
        size = pair.shape.num_bytes

        def run() -> Copy:
            return Copy(num_bytes=size, seconds=size / iperf(joined, streams=streams, num_bytes=size))

        return run

    arms = {f"raw x{streams}": threads(streams) for streams in MULTI_STREAMS}
    if iperf_available():
        arms |= {f"iperf3 -P {streams}": program(streams) for streams in (1, *MULTI_STREAMS)}
    return arms


def _per_gb(copies: Sequence[Copy], side: str) -> float | None:
    value = statistics.median(getattr(copy, side) / copy.num_bytes * 1e9 for copy in copies)
    return None if value != value else value  # not every rival tells


def _cpu(copies: Sequence[Copy], side: str) -> str:
    value = _per_gb(copies, side)
    return "" if value is None else f"{value:.3f}"
