"""The metrics of a worker that are observed as requests pass: histograms and per-request counters.

Names are vLLM's (vllm/v1/metrics/loggers.py, 0.31) where the meaning is the same, so that dashboards and routers read
both engines alike. Every child is looked up once, here; an observation per token is one bisection and one addition.
Gauges and totals that the engine keeps itself are read at scrape time by `worker/collector.py`.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

LABELS = ("model_name", "engine")
FINISH_REASONS = ("stop", "length", "abort", "error")

TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
    40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip


class WorkerMetrics:
    """One registry per process, never prometheus-client's global one. Methods may be called from any thread."""

    def __init__(self, model_name: str, *, engine: str = "0") -> None:
        self.registry = CollectorRegistry()
        self.labels = {"model_name": model_name, "engine": engine}
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "Time to first token.", TTFT_BUCKETS_S)
        self._itl = self._histogram("vllm:inter_token_latency_seconds", "Gap between two tokens.", TOKEN_BUCKETS_S)
        self._tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean gap of one request.", TOKEN_BUCKETS_S
        )
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", REQUEST_BUCKETS_S)
        self._queue = self._histogram(
            "vllm:request_queue_time_seconds", "Arrival to first scheduled, with the wait for KV.", REQUEST_BUCKETS_S
        )
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "First scheduled to first token.", REQUEST_BUCKETS_S
        )
        self._decode = self._histogram(
            "vllm:request_decode_time_seconds", "First token to last token.", REQUEST_BUCKETS_S
        )
        self._external_queries = self._counter(
            "vllm:external_prefix_cache_queries", "Prompt tokens that another worker was asked for."
        )
        self._external_hits = self._counter(
            "vllm:external_prefix_cache_hits", "Prompt tokens whose KV came from another worker."
        )
        success = Counter(
            "vllm:request_success",
            "Ended requests by reason.",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._success = {r: success.labels(**self.labels, finished_reason=r) for r in FINISH_REASONS}
        transfer = Histogram(
            "tollbridge:transfer_seconds",
            "Open to end of a KV transfer, as its requests saw it.",
            (*LABELS, "side"),
            buckets=REQUEST_BUCKETS_S,
            registry=self.registry,
        )
        self._transfer = {s: transfer.labels(**self.labels, side=s) for s in ("send", "receive")}

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def next_token(self, seconds: float) -> None:
        self._itl.observe(seconds)

    def finished(self, reason: str, *, e2e_s: float) -> None:
        """Count an ended request; only one that ended well has a latency worth a histogram."""
        self._success[reason].inc()
        if reason in ("stop", "length"):
            self._e2e.observe(e2e_s)

    def reported(self, *, queue_s: float, prefill_s: float, decode_s: float, generated_tokens: int) -> None:
        """Observe where the time of one request went."""
        self._queue.observe(queue_s)
        self._prefill.observe(prefill_s)
        self._decode.observe(decode_s)
        if generated_tokens > 1:
            self._tpot.observe(decode_s / (generated_tokens - 1))

    def external_prefix(self, *, queries: int, hits: int) -> None:
        self._external_queries.inc(queries)
        self._external_hits.inc(hits)

    def transfer_ended(self, side: str, seconds: float) -> None:
        self._transfer[side].observe(seconds)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, what, LABELS, buckets=buckets, registry=self.registry).labels(**self.labels)

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(name, what, LABELS, registry=self.registry).labels(**self.labels)
