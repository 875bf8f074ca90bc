"""The router's counters as `/metrics` shows them -> one struct. The work grows with labels, not with requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import Counter, Gauge

from tollbridge.router.metrics import RouterMetrics
from tollbridge.ui.snapshot import Totals

Labelled = list[tuple[Mapping[str, str], float]]


def totals(metrics: RouterMetrics) -> Totals:
    """Return every counter that the page shows."""
    requests, unverified = _values(metrics.requests), _values(metrics.split_unverified)
    return Totals(
        requests=_sum(requests),
        split=_sum(requests, choice="split"),
        local=_sum(requests, choice="local"),
        in_slo=_sum(_values(metrics.within_slo)),
        errors=_sum(requests, outcome="error"),
        cancelled=_sum(requests, outcome="cancelled"),
        refused=_sum(_values(metrics.refused)),
        by_reason=_by(requests, "reason"),
        verified=_sum(_values(metrics.split_verified)),
        unverified=_sum(unverified),
        unverified_by_reason=_by(unverified, "reason"),
        retries=_sum(_values(metrics.retries)),
        continued=_sum(_values(metrics.continuations), outcome="continued"),
        kv_bytes=_sum(_values(metrics.kv_bytes)),
        wire_s=_total(_values(metrics.wire_seconds)),
        toll_s=_total(_values(metrics.toll_seconds)),
        avoided_s=_total(_values(metrics.avoided_seconds)),
        cached_tokens=_sum(_values(metrics.cached_real)),
        cacheable_tokens=_sum(_values(metrics.cacheable)),
    )


def biases(metrics: RouterMetrics) -> dict[str, float]:
    """Return how far predictions are off on average, by kind."""
    return {labels["kind"]: round(value, 4) for labels, value in _values(metrics.bias)}


def _values(metric: Counter | Gauge) -> Labelled:
    return [
        (sample.labels, sample.value)
        for family in metric.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]


def _by(values: Labelled, label: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for labels, value in values:
        found[labels[label]] = found.get(labels[label], 0) + int(value)
    return found


def _total(values: Iterable[tuple[Mapping[str, str], float]], **wanted: str) -> float:
    return sum(value for labels, value in values if wanted.items() <= labels.items())


def _sum(values: Iterable[tuple[Mapping[str, str], float]], **wanted: str) -> int:
    return int(_total(values, **wanted))
