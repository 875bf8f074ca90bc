"""Every metric that Tollbridge exposes: one list, read from the code that exposes them. Docs, dashboard and alerts are
made from it, and tests hold them to it.

Router and embedded worker are asked for their families; vLLM's connector cannot be asked where vLLM is not installed,
so its families stand here, and a test compares them with its code.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal, cast

import msgspec
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from tollbridge.discovery.base import DiscoveryStatistics
from tollbridge.engine.base import EngineStatistics, ModelInfo
from tollbridge.kv.index import PrefixIndex
from tollbridge.obs.metrics import FINISH_REASONS, WorkerMetrics
from tollbridge.router.index import Following
from tollbridge.router.knowledge import KnowledgeCollector
from tollbridge.router.metrics import RouterMetrics
from tollbridge.router.roster import DiscoveryCollector
from tollbridge.router.tokens import TokensStatistics
from tollbridge.transfer.base import TransferStatistics
from tollbridge.worker.collector import StatisticsCollector

Source = Literal["router", "worker", "vLLM connector"]

# What a label can be. A label that is not here has no business in a metric: each series costs memory for ever.
LABELS = {
    "worker": "a worker of the cluster file, or one that discovery names",
    "tenant": "a tenant of the cluster file",
    "choice": "local, split",
    "reason": "a reason code ([decision.md](decision.md), [router.md](router.md)); of failures 40, then `other`",
    "outcome": "ok, error, cancelled; of a transfer done, failed, cancelled; of a broken stream continued, or why not",
    "status": "an HTTP status",
    "leg": "prefill, decode",
    "kind": "ttft, prefill, wire, step",
    "state": "held, expected, distinct",
    "change": "stored, removed, orphan, stray, unusable, forgotten, expired",
    "way": "remembered, new, asked, failed",
    "model_name": "the model that the worker serves",
    "engine": "0; of a data-parallel vLLM the number of the engine",
    "side": "send, receive",
    "medium": "tcp, shm, nixl, loopback",
    "source": "local_compute, local_cache_hit, external_kv_transfer",
    "finished_reason": ", ".join(FINISH_REASONS),
    "block_size": "a setting of the worker",
    "num_gpu_blocks": "a setting of the worker",
    "cache_dtype": "a setting of the worker",
    "enable_prefix_caching": "a setting of the worker",
}


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One metric family. `name` is what a query asks for: counters with `_total`."""

    name: str
    kind: str  # counter, gauge, histogram
    labels: tuple[str, ...]
    text: str
    source: Source

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its samples."""
        if self.kind == "histogram":
            return (f"{self.name}_bucket", f"{self.name}_sum", f"{self.name}_count")
        return (self.name,)


def catalogue() -> list[Entry]:
    """Return every metric, the router's first."""
    return [*_router(), *_worker(), *CONNECTOR]


def entry(family: Metric, labels: Iterable[str], source: Source) -> Entry:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    return Entry(name=name, kind=family.type, labels=tuple(labels), text=family.documentation, source=source)


def _router() -> list[Entry]:
    reads = [
        KnowledgeCollector(cast(Any, _Feeder()), cast(Any, _Tokens())),
        DiscoveryCollector(cast(Any, _Discovery())),
    ]
    return [*_observed(RouterMetrics().registry, "router"), *(each for read in reads for each in _read(read, "router"))]


def _worker() -> list[Entry]:
    metrics = WorkerMetrics("a model")
    read = StatisticsCollector(cast(Any, _Engine()), lambda: {"send": _SIDE, "receive": _SIDE}, metrics.labels)
    return [*_observed(metrics.registry, "worker"), *_read(read, "worker")]


def _observed(registry: CollectorRegistry, source: Source) -> list[Entry]:
    """Return the families of prometheus-client's own metrics, whether or not anything was observed."""
    collectors: list[Collector] = list(registry._collector_to_names)
    found = []
    for each in collectors:
        assert isinstance(each, MetricWrapperBase)
        found += [entry(family, each._labelnames, source) for family in each.describe()]
    return found


def _read(collector: Collector, source: Source) -> list[Entry]:
    """Return the families of a collector that makes them as it is asked, from stand-ins that have one of everything."""
    return [
        entry(family, dict.fromkeys(name for sample in family.samples for name in sample.labels), source)
        for family in collector.collect()
    ]


_SIDE = TransferStatistics(
    medium="tcp", active=0, done=0, failed=0, cancelled=0, payload_bytes=0, wire_bytes=0, num_connections=0,
    goodput_bytes_per_s=0.0, failures_by_reason={}, num_connections_by_medium={"tcp": 0},
    payload_bytes_by_medium={"tcp": 0},
)  # fmt: skip


class _Feeder:
    """As much of a feeder of the index as its collector asks for."""

    index = PrefixIndex(max_entries=1, max_entries_per_worker=1)
    following: ClassVar[dict[str, Following]] = {"w": Following()}


class _Tokens:
    def statistics(self) -> TokensStatistics:
        return TokensStatistics(
            num_remembered=0, remembered_bytes=0, hits_total=0, misses_total=0, asked_total=0, failed_total=0
        )


class _Discovery:
    def statistics(self) -> DiscoveryStatistics:
        return DiscoveryStatistics(kind="", where="", age_s=0.0)


class _Engine:
    """As much of an engine as its collector asks for."""

    info = ModelInfo(
        name="", max_model_len=0, vocab_size=0, dtype="", block_size=0, num_blocks=0, kv_bytes_per_token=0,
        eos_token_ids=(),
    )  # fmt: skip

    def statistics(self) -> EngineStatistics:
        return EngineStatistics()


_ENGINE = ("model_name", "engine")


def _of_connector(name: str, kind: str, text: str, *labels: str) -> Entry:
    return Entry(
        name=f"vllm:tollbridge_{name}", kind=kind, labels=(*_ENGINE, *labels), text=text, source="vLLM connector"
    )


CONNECTOR = [
    _of_connector("transfers_total", "counter", "KV transfers that ended.", "side", "outcome"),
    _of_connector("failures_total", "counter", "KV transfers that failed.", "side", "reason"),
    _of_connector("wire_bytes_total", "counter", "Bytes of KV transfers on the wire.", "side"),
    _of_connector("loaded_tokens_total", "counter", "Prompt tokens whose KV came over the wire."),
    _of_connector("recomputed_tokens_total", "counter", "Prompt tokens recomputed: their KV did not come."),
    _of_connector("load_wait_seconds", "histogram", "From asking for KV to its first byte."),
    _of_connector("load_wire_seconds", "histogram", "From the first byte of KV to the last."),
    _of_connector("load_seconds", "histogram", "From asking for KV to its end."),
    _of_connector("load_bytes", "histogram", "KV bytes of one load."),
    _of_connector("goodput_bytes_per_s", "gauge", "KV bytes per second on the wire, of the last loads."),
    _of_connector("pinned_blocks", "gauge", "KV blocks held for finished sends."),
    _of_connector("max_pinned_blocks", "gauge", "Pinned blocks beyond which sends are given up."),
    _of_connector("waiting_prefill_tokens", "gauge", "Prompt tokens of requests that wait."),
    _of_connector("kv_bytes_per_token", "gauge", "KV bytes of a token, all layers and ranks."),
    _of_connector("max_num_batched_tokens", "gauge", "Token budget of a step."),
    _of_connector("io_processes", "gauge", "I/O processes that move KV; 0: threads do."),
]
