"""From samples to figures: by window, pooled, and under the key names of `vllm bench serve`. Pure.

TTFT: first token - request sent. ITL: every gap between two chunks that carried tokens, pooled over requests. TPOT of a
request: (last token - first token) / (tokens - 1), of requests with more than one token. E2E: last token - request
sent. A failed request has no latencies, counts among the requests, and misses its SLO.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from tollbridge.bench.load import STEADY
from tollbridge.bench.records import Sample, Window
from tollbridge.bench.stats import percentile

DEFINITIONS = (
    "TTFT: first token - request sent (connecting included). "
    "ITL: every gap between two chunks that carry tokens, pooled over requests. "
    "TPOT: per request, (last token - first token) / (tokens - 1), of requests with more than one token. "
    "E2E: last token - request sent. Goodput: requests/s that meet all SLOs; a failed request misses them."
)


@dataclass(frozen=True, kw_only=True)
class Slo:
    """The objectives of a request. None: not asked for."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_p99_s: float | None = None
    latency_s: float | None = None

    def met(self, sample: Sample) -> bool:
        if not sample.ok or sample.cut:
            return False
        values = (sample.ttft_s, sample.tpot_s or 0.0, percentile(sample.gaps_s, 99) or 0.0, sample.latency_s)
        limits = (self.ttft_s, self.tpot_s, self.itl_p99_s, self.latency_s)
        return all(limit is None or not value > limit for value, limit in zip(values, limits, strict=True) if value)


@dataclass(frozen=True, kw_only=True)
class Group:
    """The samples of one arm at one cell, over one or all blocks, and its windows."""

    samples: Sequence[Sample]
    windows: Sequence[Window]

    @property
    def requests(self) -> list[Sample]:
        """Requests proper: steady streams only make gaps."""
        return [sample for sample in self.samples if sample.group != STEADY]

    @property
    def duration_s(self) -> float:
        return sum(window.duration_s for window in self.windows)

    def ttfts_s(self) -> list[float]:
        return [s.ttft_s for s in self.requests if s.ok and s.ttft_s is not None]

    def tpots_s(self) -> list[float]:
        return [s.tpot_s for s in self.requests if s.ok and s.tpot_s is not None]

    def latencies_s(self) -> list[float]:
        return [s.latency_s for s in self.requests if s.ok and s.latency_s is not None and not s.cut]

    def gaps_s(self, *, steady: bool | None = None) -> list[float]:
        """Return the gaps within the windows: of steady streams, of requests proper, or of both (None)."""
        ends = {(w.cell, w.block): w.duration_s for w in self.windows}
        chosen = [s for s in self.samples if not s.failure and (steady is None or (s.group == STEADY) is steady)]
        gaps: list[float] = []
        for sample in chosen:
            if sample.group == STEADY:
                gaps += sample.gaps_within(ends[sample.cell, sample.block])
            else:
                gaps += sample.gaps_s
        return gaps

    def num_tokens(self) -> int:
        """Return the tokens that arrived within the windows, of steady streams and requests."""
        proper = sum(s.num_tokens for s in self.requests if s.ok)
        return proper + len(self.gaps_s(steady=True))

    def lags_s(self) -> list[float]:
        return [s.lag_s for s in self.requests]

    def counter(self, name: str) -> float:
        """Return what a counter of the workers grew by, over all of them."""
        return sum(by.get(name, 0.0) for window in self.windows for by in window.counters.values())

    def wire(self) -> tuple[float, float]:
        """Return (KV bytes of a split, seconds from its first to its last); NaN where nobody knows.

        Medians of what decode reports of each request; for vLLM, whose streams report nothing, means by its counters.
        """
        told = [s for s in self.requests if s.wire_bytes]
        if told:
            return percentile([s.wire_bytes for s in told], 50), percentile([s.wire_s for s in told], 50)
        return self.mean("vllm:tollbridge_load_bytes"), self.mean("vllm:tollbridge_load_wire_seconds")

    def mean(self, histogram: str) -> float:
        """Return the mean of what a histogram of the workers was told meanwhile; NaN of nothing."""
        count = self.counter(histogram + "_count")
        return self.counter(histogram + "_sum") / count if count else math.nan

    def energy_j(self) -> float:
        """Return what all GPUs of this machine took; NaN where nobody knows."""
        known = [window.energy_j for window in self.windows if window.energy_j is not None]
        return sum(known) if known and len(known) == len(self.windows) else math.nan

    def cached_share(self) -> float | None:
        """Return cached prompt tokens over prompt tokens, as the answers say; None when none of them does."""
        told = [s for s in self.requests if s.ok and s.num_cached is not None]
        total = sum(s.num_prompt_tokens for s in told)
        return sum(s.num_cached or 0 for s in told) / total if total else None


Metric = Callable[[Group], float]


METRICS: Mapping[str, Metric] = {
    "ttft_p50_ms": lambda g: 1e3 * percentile(g.ttfts_s(), 50),
    "ttft_p99_ms": lambda g: 1e3 * percentile(g.ttfts_s(), 99),
    "itl_p50_ms": lambda g: 1e3 * percentile(g.gaps_s(), 50),
    "itl_p90_ms": lambda g: 1e3 * percentile(g.gaps_s(), 90),
    "itl_p99_ms": lambda g: 1e3 * percentile(g.gaps_s(), 99),
    "itl_max_ms": lambda g: 1e3 * max(g.gaps_s(), default=math.nan),
    "steady_itl_p50_ms": lambda g: 1e3 * percentile(g.gaps_s(steady=True), 50),
    "steady_itl_p90_ms": lambda g: 1e3 * percentile(g.gaps_s(steady=True), 90),
    "steady_itl_p99_ms": lambda g: 1e3 * percentile(g.gaps_s(steady=True), 99),
    "steady_itl_max_ms": lambda g: 1e3 * max(g.gaps_s(steady=True), default=math.nan),
    "tpot_p50_ms": lambda g: 1e3 * percentile(g.tpots_s(), 50),
    "e2e_p50_ms": lambda g: 1e3 * percentile(g.latencies_s(), 50),
    "requests_per_s": lambda g: len([s for s in g.requests if s.ok]) / g.duration_s,
    "tokens_per_s": lambda g: g.num_tokens() / g.duration_s,
    "tokens_per_s_per_worker": lambda g: g.num_tokens() / g.duration_s / max(w.num_workers for w in g.windows),
    "send_lag_p99_ms": lambda g: 1e3 * percentile(g.lags_s(), 99),
    "cached_share": lambda g: math.nan if (share := g.cached_share()) is None else share,
    "kv_mb_per_split": lambda g: g.wire()[0] / 1e6,
    "wire_p50_ms": lambda g: 1e3 * g.wire()[1],
    "joules_per_token": lambda g: g.energy_j() / max(1, g.num_tokens()),
    "queue_mean_ms": lambda g: 1e3 * g.mean("vllm:request_queue_time_seconds"),
}


def select(samples: Iterable[Sample], windows: Iterable[Window], **keys: object) -> Group:
    """Return what has the given `cell`, `block`, `arm`; those left out are not asked for."""

    def fits(line: Sample | Window) -> bool:
        return all(getattr(line, name) == value for name, value in keys.items())

    return Group(samples=[s for s in samples if fits(s)], windows=[w for w in windows if fits(w)])


def by_block(samples: Sequence[Sample], windows: Sequence[Window], metric: str, *, cell: str, arm: str) -> list[float]:
    """Return a metric's value in each block of an arm at a cell, in the order of blocks."""
    blocks = sorted({w.block for w in windows if w.cell == cell and w.arm == arm})
    return [METRICS[metric](select(samples, windows, cell=cell, arm=arm, block=block)) for block in blocks]


def as_vllm(group: Group, slo: Slo | None = None) -> dict[str, object]:
    """Return the figures of a group under the names that `vllm bench serve` writes, which people's scripts read.

    `request_goodput` counts failed requests as missed, which vLLM leaves out; `tpot` of one token is left out.
    """
    requests = group.requests
    done = [s for s in requests if s.ok]
    duration_s = group.duration_s
    total_input = sum(s.num_prompt_tokens for s in done)
    total_output = sum(s.num_tokens for s in done)
    result: dict[str, object] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(requests) - len(done),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(done) / duration_s,
        "request_goodput": sum(map(slo.met, requests)) / duration_s if slo else None,
        "output_throughput": total_output / duration_s,
        "total_token_throughput": (total_input + total_output) / duration_s,
        "num_prompts": len(requests),
        "max_output_tokens_per_s": _most_in_a_second(done),
        "max_concurrent_requests": _most_at_once(requests),
    }
    for name, values in (
        ("ttft", group.ttfts_s()),
        ("tpot", group.tpots_s()),
        ("itl", group.gaps_s()),
        ("e2el", group.latencies_s()),
    ):
        result |= _spread(name, [1e3 * value for value in values])
    return result


def _most_in_a_second(samples: Iterable[Sample]) -> float:
    """Return the most chunks with tokens in any second of a window, as vLLM counts them."""
    seconds: Counter[tuple[str, int, int]] = Counter()
    for sample in samples:
        at_s = sample.sent_s + (sample.ttft_s or 0.0)
        for arrival_s in accumulate(sample.gaps_s, initial=at_s):
            seconds[sample.cell, sample.block, int(arrival_s)] += 1
    return float(max(seconds.values(), default=0))


def _most_at_once(samples: Iterable[Sample]) -> int:
    """Return the most requests that were under way at one moment of a window (vLLM: within a second)."""
    most = 0
    by_window: dict[tuple[str, int], list[tuple[float, int]]] = {}
    for sample in samples:
        if sample.latency_s is not None:
            edges = by_window.setdefault((sample.cell, sample.block), [])
            edges += [(sample.sent_s, 1), (sample.sent_s + sample.latency_s, -1)]
    for edges in by_window.values():
        most = max(most, *accumulate(change for _, change in sorted(edges)))
    return most


def _spread(name: str, values_ms: Sequence[float]) -> dict[str, object]:
    if not values_ms:
        return dict.fromkeys([f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p50", "p90", "p99")])
    return {
        f"mean_{name}_ms": float(np.mean(values_ms)),
        f"median_{name}_ms": float(np.median(values_ms)),
        f"std_{name}_ms": float(np.std(values_ms)),
        **{f"p{q}_{name}_ms": percentile(values_ms, q) for q in (50, 90, 99)},
    }


MAX_LAG_S = 0.005
_LAG_SHARE = 0.01  # of the median latency: less is nothing beside what is measured


def remarks(samples: Sequence[Sample]) -> list[str]:
    """Return what a reader must know before trusting the figures: failures, merged tokens, a client that lags."""
    found = []
    for arm in sorted({s.arm for s in samples}):
        mine = [s for s in samples if s.arm == arm]
        found += _failures(arm, mine)
        ended = sum(s.group == STEADY and not s.cut and not s.failure for s in mine)
        if ended:
            found.append(f"{arm}: {ended} steady streams ended by themselves before their window did.")
        merged = sum(s.num_merged for s in mine)
        if merged:
            total = sum(s.num_tokens for s in mine)
            found.append(
                f"{arm}: {merged} of {total} tokens shared a chunk with another one: its gaps are between chunks, "
                "not between tokens."
            )
        proper = [s for s in mine if s.group != STEADY]
        lag_s = percentile([s.lag_s for s in proper] or [0.0], 99)
        latency_s = percentile([s.latency_s for s in proper if s.latency_s is not None] or [0.0], 50)
        max_lag_s = max(MAX_LAG_S, _LAG_SHARE * latency_s)
        if lag_s > max_lag_s:
            found.append(
                f"{arm}: THE CLIENT LAGGED. Requests left {1e3 * lag_s:.1f} ms late (p99, bound "
                f"{1e3 * max_lag_s:.0f} ms): the load was not the one asked for; use more --processes."
            )
    return found


def _failures(arm: str, samples: Sequence[Sample]) -> list[str]:
    lines = []
    for kind in sorted({s.failure for s in samples if s.failure}):
        of_kind = [s for s in samples if s.failure == kind]
        lines.append(f"{arm}: {len(of_kind)} of {len(samples)} requests failed ({kind}): {of_kind[0].detail}")
    return lines
