"""From the records of requests to the figures of one policy. Definitions are printed with them (`DEFINITIONS`)."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from tollbridge.config.cluster import SloConfig

DEFINITIONS = (
    "TTFT: first token - request sent. ITL: every gap between tokens, pooled (in bins of 0.5 %). "
    "TPOT: (last token - first) / (tokens - 1), requests of two tokens or more. Goodput: requests/s that meet TTFT, "
    "TPOT and p99 of their own gaps; one that failed met nothing. Hit ratio: prompt tokens that nobody had to compute. "
    "Wire: KV bytes that crossed."
)
_BIN = math.log(1.005)
_LOWEST_S = 1e-6


@dataclass(eq=False, slots=True)
class Record:
    """What happened to one request. Times in seconds."""

    at_s: float
    num_prompt: int
    choice: str = ""
    ttft_s: float | None = None
    ended_s: float = 0.0
    cached_tokens: int = 0
    wire_bytes: float = 0.0
    retries: int = 0
    failed: bool = False
    token_times: array[float] = field(default_factory=lambda: array("d"))


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds; NaN (null in JSON) when there was nothing to measure."""

    p50: float
    p90: float
    p99: float
    mean: float


class PolicyResult(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on one set of arrivals."""

    policy: str
    num_requests: int
    num_failed: int
    num_split: int
    num_retries: int
    good: float  # share
    goodput_per_s: float
    goodput_per_gpu_s: float
    ttft_s: Quantiles
    tpot_s: Quantiles
    itl_s: Quantiles
    output_tokens_per_s: float
    hit_ratio: float
    wire_bytes: float
    preemptions: int
    simulated_s: float  # until the last request had ended


class Tally:
    """Takes the records of one policy as they end."""

    def __init__(self, slo: SloConfig, *, warmup_s: float = 0.0) -> None:
        self._slo = slo
        self._warmup_s = warmup_s
        self._ttfts = array("d")
        self._tpots = array("d")
        self._gap_bins = np.zeros(8192, dtype=np.int64)
        self._gap_sum = 0.0
        self.num_ended = 0
        self._num_counted = self._num_failed = self._num_split = self._num_good = self._num_retries = 0
        self._num_prompt = self._num_cached = self._num_tokens = 0
        self._wire_bytes = 0.0

    @property
    def num_missed(self) -> int:
        """Requests so far that did not meet their SLO."""
        return self._num_counted - self._num_good

    def add(self, record: Record) -> None:
        self.num_ended += 1
        if record.at_s < self._warmup_s:
            return
        self._num_counted += 1
        self._num_split += record.choice == "split"
        self._num_retries += record.retries
        self._wire_bytes += record.wire_bytes
        self._num_tokens += len(record.token_times)
        if record.failed or record.ttft_s is None:
            self._num_failed += 1
            return
        self._num_prompt += record.num_prompt
        self._num_cached += min(record.cached_tokens, record.num_prompt)
        self._ttfts.append(record.ttft_s)
        tpot_s, itl_p99_s = self._take_gaps(record.token_times)
        slo = self._slo
        self._num_good += record.ttft_s <= slo.ttft_s and tpot_s <= slo.tpot_s and itl_p99_s <= slo.itl_p99_s

    def result(self, policy: str, *, span_s: float, num_gpus: int, preemptions: int, now_s: float) -> PolicyResult:
        """Return the figures; `span_s` is the time over which the counted requests arrived."""
        counted = max(1, self._num_counted)
        return PolicyResult(
            policy=policy,
            num_requests=self._num_counted,
            num_failed=self._num_failed,
            num_split=self._num_split,
            num_retries=self._num_retries,
            good=self._num_good / counted,
            goodput_per_s=self._num_good / span_s,
            goodput_per_gpu_s=self._num_good / span_s / num_gpus,
            ttft_s=quantiles(self._ttfts),
            tpot_s=quantiles(self._tpots),
            itl_s=self._gap_quantiles(),
            output_tokens_per_s=self._num_tokens / span_s,
            hit_ratio=self._num_cached / max(1, self._num_prompt),
            wire_bytes=self._wire_bytes,
            preemptions=preemptions,
            simulated_s=now_s,
        )

    def _take_gaps(self, times: array[float]) -> tuple[float, float]:
        """Return (TPOT, p99 of the gaps) of one request, 0 for one token."""
        if len(times) < 2:
            return 0.0, 0.0
        gaps = np.diff(np.frombuffer(times))
        bins = np.clip(np.log(np.maximum(gaps, _LOWEST_S) / _LOWEST_S) / _BIN, 0, len(self._gap_bins) - 1)
        np.add.at(self._gap_bins, bins.astype(np.int64), 1)
        self._gap_sum += float(gaps.sum())
        tpot_s = (times[-1] - times[0]) / (len(times) - 1)
        self._tpots.append(tpot_s)
        return tpot_s, percentile(np.sort(gaps), 0.99)

    def _gap_quantiles(self) -> Quantiles:
        total = int(self._gap_bins.sum())
        if not total:
            return Quantiles(p50=math.nan, p90=math.nan, p99=math.nan, mean=math.nan)
        below = np.cumsum(self._gap_bins)

        def at(share: float) -> float:
            return _LOWEST_S * math.exp(_BIN * (int(np.searchsorted(below, share * total)) + 0.5))

        return Quantiles(p50=at(0.5), p90=at(0.9), p99=at(0.99), mean=self._gap_sum / total)


def quantiles(values: Sequence[float]) -> Quantiles:
    """Return the quantiles of `values`, interpolated."""
    if not len(values):
        return Quantiles(p50=math.nan, p90=math.nan, p99=math.nan, mean=math.nan)
    ordered = np.sort(np.asarray(values))
    shares = {name: percentile(ordered, share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}
    return Quantiles(mean=float(ordered.mean()), **shares)


def percentile(ordered: npt.NDArray[np.float64], share: float) -> float:
    """Return the quantile of sorted values, linear between its neighbours."""
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (at - low) * (ordered[high] - ordered[low]))
