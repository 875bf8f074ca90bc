"""The router's metrics. Labels come from closed sets: workers of the cluster file, choices, reason codes, outcomes."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_GAP_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0)
_ERROR_BUCKETS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
_BIAS_WEIGHT = 0.05
_CODE = re.compile(r"[a-z][a-z0-9_]{0,39}")
_MAX_CODES = 40


class Codes:
    """Keeps a label's values bounded: the first few well-formed codes pass, everything else is "other"."""

    def __init__(self, bound: int = _MAX_CODES) -> None:
        self._bound = bound
        self._seen: set[str] = set()

    def label(self, code: str) -> str:
        """Return `code`, or "other" when it is malformed or one too many."""
        if code in self._seen:
            return code
        if not _CODE.fullmatch(code) or len(self._seen) >= self._bound:
            return "other"
        self._seen.add(code)
        return code


class RouterMetrics:
    """One set per router, in its own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.codes = Codes()
        self.requests = self._counter(
            "requests", "Requests that ended, by decision and outcome.", "choice", "reason", "outcome"
        )
        self.refused = self._counter("refused_requests", "Requests refused before a decision, by status.", "status")
        self.retries = self._counter("retries", "Second attempts before the first byte, by reason.", "reason")
        self.retries_refused = self._counter(
            "retries_refused", "Further attempts not made because the budget was spent."
        )
        self.continuations = self._counter(
            "continuations", "Streams that broke off: continued on another worker, or why not.", "outcome"
        )
        self.upstream_errors = self._counter("upstream_errors", "Failed legs, by worker and leg.", "worker", "leg")
        self.split_verified = self._counter("split_verified", "Splits whose decode worker loaded all KV it lacked.")
        self.split_unverified = self._counter(
            "split_unverified", "Splits that paid prefill twice, by reason.", "reason"
        )
        self.kv_bytes = self._counter("kv_payload_bytes", "KV bytes that decode workers received, as they report.")
        self.wire_seconds = self._counter("kv_wire_seconds", "First to last KV byte, summed, as decode workers report.")
        self.trials = self._counter("link_trials", "Splits of our own to learn what a link carries.", "outcome")
        self.within_slo = self._counter("slo_requests", "Answered requests that met the SLO: goodput.", "choice")
        self.toll_seconds = self._counter("toll_seconds", "What splits added to their own first token, summed.")
        self.avoided_seconds = self._counter(
            "stall_avoided_seconds", "Time that streams were spared by splits, summed over them, as predicted."
        )
        self._errors = self._histogram(
            "prediction_error_ratio",
            "How far a prediction was off, over what happened, by kind.",
            "kind",
            _ERROR_BUCKETS,
        )
        self.bias = self._gauge(
            "prediction_bias_ratio", "The same with its sign, averaged: above 0 is too pessimistic.", "kind"
        )
        self._biases: dict[str, float] = {}
        self.chunks = self._counter("relayed_chunks", "Pieces of streams written to clients.")
        self.ttft = self._histogram(
            "time_to_first_token_seconds",
            "Decision to first event or whole answer, and the wait for a place.",
        )
        self.longest_gap = self._histogram(
            "longest_gap_seconds", "Longest time between two pieces of a stream.", buckets=_GAP_BUCKETS
        )
        self.duration = self._histogram("request_duration_seconds", "Decision to end, and the wait for a place.")
        self.queue = Histogram(
            "tollbridge_router_queue_seconds",
            "Wait for a place among the requests in flight.",
            ("tenant",),
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.waiting = self._gauge("waiting_requests", "Requests that wait for a place.")
        self.in_flight = self._gauge("in_flight_requests", "Requests being served now.")
        self.cached_predicted = self._counter(
            "cached_prompt_tokens_predicted", "Prompt tokens that the index expected in the cache of the worker chosen."
        )
        self.cached_real = self._counter(
            "cached_prompt_tokens_real", "Prompt tokens of the same requests that the worker found in its cache."
        )
        self.cacheable = self._counter("cacheable_prompt_tokens", "Prompt tokens of the same requests.")
        self.worker_ready = self._gauge("worker_ready", "1 when the worker passed its last health check.", "worker")

    def watch(self, in_flight: Callable[[], float], waiting: Callable[[], float]) -> None:
        """Ask for the two gauges of requests when somebody scrapes."""
        self.in_flight.set_function(in_flight)
        self.waiting.set_function(waiting)

    def forget(self, worker: str) -> None:
        """Drop the series of a worker that has left."""
        for family, labels in (
            (self.worker_ready, (worker,)),
            (self.upstream_errors, (worker, "prefill")),
            (self.upstream_errors, (worker, "decode")),
        ):
            with suppress(KeyError):
                family.remove(*labels)

    def predicted(self, kind: str, error: float) -> None:
        """Count one prediction that was compared with what happened; `error` is (predicted - real) / real."""
        self._errors.labels(kind).observe(abs(error))
        bias = self._biases.get(kind, error)
        self._biases[kind] = bias + _BIAS_WEIGHT * (error - bias)
        self.bias.labels(kind).set(self._biases[kind])

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"tollbridge_router_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"tollbridge_router_{name}", text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, label: str = "choice", buckets: tuple[float, ...] = _LATENCY_BUCKETS
    ) -> Histogram:
        return Histogram(f"tollbridge_router_{name}", text, (label,), buckets=buckets, registry=self.registry)
