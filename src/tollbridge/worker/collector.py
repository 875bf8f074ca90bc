"""The engine's and the transfers' own counters as Prometheus families, read when somebody scrapes.

Nothing is copied per step: the engine counts for itself, and a scrape takes one consistent snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tollbridge.engine.base import Engine, EngineStatistics
from tollbridge.transfer.base import TransferStatistics

Transfers = Callable[[], dict[str, TransferStatistics]]


class StatisticsCollector(Collector):
    """Reads `engine.statistics()` and the transfer statistics by side ("send", "receive") at each scrape."""

    def __init__(self, engine: Engine, transfers: Transfers, labels: dict[str, str]) -> None:
        self._engine = engine
        self._transfers = transfers
        self._names = list(labels)
        self._values = list(labels.values())

    def collect(self) -> Iterator[Metric]:
        statistics = self._engine.statistics()
        yield from self._engine_gauges(statistics)
        yield from self._engine_counters(statistics)
        yield self._cache_config()
        yield from self._transfer_families(self._transfers())

    def describe(self) -> Iterator[Metric]:
        """Name nothing at registration: a scrape may then be the first to ask the engine."""
        return iter(())

    def _engine_gauges(self, now: EngineStatistics) -> Iterator[Metric]:
        used = 1 - now.num_free_blocks / now.num_blocks if now.num_blocks else 0.0
        yield self._gauge("vllm:num_requests_running", "Requests in the running batch.", now.num_running)
        yield self._gauge(
            "vllm:num_requests_waiting", "Requests waiting, for capacity or for KV.", now.num_waiting + now.num_parked
        )
        by_reason = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Requests waiting for capacity, or deferred until their KV has come.",
            labels=[*self._names, "reason"],
        )
        by_reason.add_metric([*self._values, "capacity"], now.num_waiting)
        by_reason.add_metric([*self._values, "deferred"], now.num_parked)
        yield by_reason
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", used)
        yield self._gauge("tollbridge:pinned_blocks", "KV blocks held for an unfinished send.", now.num_pinned_blocks)
        yield self._gauge(
            "tollbridge:max_pinned_blocks", "Pinned blocks beyond which sends are given up.", now.max_pinned_blocks
        )
        yield self._gauge(
            "tollbridge:waiting_prefill_tokens", "Prompt tokens still to be computed.", now.waiting_prefill_tokens
        )

    def _engine_counters(self, now: EngineStatistics) -> Iterator[Metric]:
        yield self._counter("vllm:prompt_tokens", "Prompt tokens processed.", now.prompt_tokens_total)
        yield self._counter("vllm:generation_tokens", "Tokens generated.", now.generation_tokens_total)
        yield self._counter(
            "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", now.prefix_cache_queries_total
        )
        yield self._counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", now.prefix_cache_hits_total)
        yield self._counter("vllm:num_preemptions", "Preempted requests.", now.preemptions_total)
        yield self._counter(
            "tollbridge:kv_recomputed_tokens",
            "Prompt tokens recomputed because their KV did not arrive.",
            now.kv_recomputed_tokens_total,
        )
        yield self._counter("tollbridge:engine_steps", "Forward passes.", now.steps_total)
        by_source = CounterMetricFamily(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where their KV came from.",
            labels=[*self._names, "source"],
        )
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer"):
            by_source.add_metric([*self._values, source], now.prompt_tokens_by_source.get(source, 0))
        yield by_source

    def _cache_config(self) -> Metric:
        info = self._engine.info
        config = {
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
            "cache_dtype": info.dtype,
            "enable_prefix_caching": "True",
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "The KV cache, in labels.", labels=[*self._names, *config])
        family.add_metric([*self._values, *config.values()], 1)
        return family

    def _transfer_families(self, by_side: dict[str, TransferStatistics]) -> Iterator[Metric]:
        yield self._by_side(GaugeMetricFamily, "active", "Transfers under way.", by_side, lambda s: s.active)
        yield self._by_medium(
            GaugeMetricFamily, "connections", "Open KV connections.", by_side, lambda s: s.num_connections_by_medium
        )
        yield self._by_side(
            GaugeMetricFamily,
            "goodput_bytes_per_second",
            "KV bytes a second, of the last transfers.",
            by_side,
            lambda s: s.goodput_bytes_per_s,
        )
        yield self._by_side(
            GaugeMetricFamily, "pending_bytes", "KV bytes still to cross.", by_side, lambda s: s.pending_bytes
        )
        yield self._by_medium(
            CounterMetricFamily,
            "payload_bytes",
            "KV bytes, without headers, by what carried them.",
            by_side,
            lambda s: s.payload_bytes_by_medium,
        )
        yield self._by_side(
            CounterMetricFamily, "wire_bytes", "Bytes on the wire, headers included.", by_side, lambda s: s.wire_bytes
        )
        ends = CounterMetricFamily(
            "tollbridge:transfer_ends",
            "Ended transfers by side, outcome and reason.",
            labels=[*self._names, "side", "outcome", "reason"],
        )
        for side, statistics in by_side.items():
            ends.add_metric([*self._values, side, "done", ""], statistics.done)
            ends.add_metric([*self._values, side, "cancelled", ""], statistics.cancelled)
            for reason, number in statistics.failures_by_reason.items():
                ends.add_metric([*self._values, side, "failed", reason], number)
        yield ends

    def _by_side(
        self,
        family: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        what: str,
        by_side: dict[str, TransferStatistics],
        value: Callable[[TransferStatistics], float],
    ) -> Metric:
        made = family(f"tollbridge:transfer_{name}", what, labels=[*self._names, "side"])
        for side, statistics in by_side.items():
            made.add_metric([*self._values, side], value(statistics))
        return made

    def _by_medium(
        self,
        family: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        what: str,
        by_side: dict[str, TransferStatistics],
        values: Callable[[TransferStatistics], dict[str, int]],
    ) -> Metric:
        made = family(f"tollbridge:transfer_{name}", what, labels=[*self._names, "side", "medium"])
        for side, statistics in by_side.items():
            for medium, value in values(statistics).items():
                made.add_metric([*self._values, side, medium], value)
        return made

    def _gauge(self, name: str, what: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, what, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, what: str, value: float) -> Metric:
        family = CounterMetricFamily(name, what, labels=self._names)
        family.add_metric(self._values, value)
        return family
