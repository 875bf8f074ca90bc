"""vLLM's view of the tally: aggregated over workers, one line in its log, and metrics on the server's /metrics.

vllm:tollbridge_transfers_total{side,outcome}      ended transfers
vllm:tollbridge_failures_total{side,reason}        failed ones, by reason
vllm:tollbridge_wire_bytes_total{side}             bytes on the wire, headers included
vllm:tollbridge_loaded_tokens_total                prompt tokens whose KV was accepted
vllm:tollbridge_recomputed_tokens_total            prompt tokens recomputed because their KV did not come
vllm:tollbridge_load_wait_seconds                  open -> first payload byte
vllm:tollbridge_load_wire_seconds                  first -> last payload byte
vllm:tollbridge_load_seconds                       open -> end
vllm:tollbridge_load_bytes                         KV bytes of one load
vllm:tollbridge_goodput_bytes_per_s                of the accepted loads of the last interval
vllm:tollbridge_pinned_blocks                      held for finished sends that decode has not fetched
vllm:tollbridge_max_pinned_blocks                  their bound: beyond it the newest unopened sends are given up
vllm:tollbridge_waiting_prefill_tokens             prompt tokens of requests that have not begun to run
vllm:tollbridge_kv_bytes_per_token                 KV of a token, all layers and ranks
vllm:tollbridge_max_num_batched_tokens             token budget of a step
vllm:tollbridge_io_processes                       that move KV, one for each direction; 0: threads do
"""

# vLLM is not installed where types are checked: its classes are Any.
# mypy: disable-error-code="import-not-found,misc"
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from tollbridge.vllm import tally

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BYTES = tuple(float(4**power) for power in range(6, 18))  # 4 KiB .. 16 GiB
_PREFIX = "vllm:tollbridge_"


@dataclass
class TollbridgeStats(KVConnectorStats):
    """The tally of an interval. `data` travels between processes, so it holds plain values only."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = tally.empty()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        tally.merge(self.data, other.data)
        return self

    def is_empty(self) -> bool:
        return tally.is_empty(self.data)

    def reduce(self) -> dict[str, int | float]:
        """Return the figures of vLLM's periodic log line."""
        loads = self.data["total_s"]
        return {
            "loads": len(loads),
            "loaded tokens": self.data["loaded_tokens"],
            "recomputed tokens": self.data["recomputed_tokens"],
            "goodput (MB/s)": round(tally.goodput_bytes_per_s(self.data) / 1e6, 1),
            "mean load (ms)": round(1e3 * sum(loads) / len(loads), 1) if loads else 0.0,
            "sends": sum(self.data["send_outcomes"].values()),
            "failures": sum(self.data["failures"].values()),
        }


class TollbridgePromMetrics(KVConnectorPromMetrics):
    """See the top of the file."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        self._types = metric_types
        self._transfers = self._counter("transfers", "KV transfers that ended.", "side", "outcome")
        self._failures = self._counter("failures", "KV transfers that failed.", "side", "reason")
        self._wire_bytes = self._counter("wire_bytes", "Bytes of KV transfers on the wire.", "side")
        self._tokens = {
            "loaded_tokens": self._counter("loaded_tokens", "Prompt tokens whose KV came over the wire."),
            "recomputed_tokens": self._counter("recomputed_tokens", "Prompt tokens recomputed: their KV did not come."),
        }
        self._histograms = {
            "wait_s": self._histogram("load_wait_seconds", "From asking for KV to its first byte.", _SECONDS),
            "wire_s": self._histogram("load_wire_seconds", "From the first byte of KV to the last.", _SECONDS),
            "total_s": self._histogram("load_seconds", "From asking for KV to its end.", _SECONDS),
            "payload_bytes": self._histogram("load_bytes", "KV bytes of one load.", _BYTES),
        }
        self._goodput = self._gauge("goodput_bytes_per_s", "KV bytes per second on the wire, of the last loads.")
        self._gauges = {
            "pinned_blocks": self._gauge("pinned_blocks", "KV blocks held for finished sends."),
            "max_pinned_blocks": self._gauge("max_pinned_blocks", "Pinned blocks beyond which sends are given up."),
            "waiting_prefill_tokens": self._gauge("waiting_prefill_tokens", "Prompt tokens of requests that wait."),
            "kv_bytes_per_token": self._gauge("kv_bytes_per_token", "KV bytes of a token, all layers and ranks."),
            "max_num_batched_tokens": self._gauge("max_num_batched_tokens", "Token budget of a step."),
            "io_processes": self._gauge("io_processes", "I/O processes that move KV; 0: threads do."),
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record the tally of an interval."""
        data, engine = transfer_stats_data, self.per_engine_labelvalues[engine_idx]
        for side in ("send", "receive"):
            for outcome, count in data[f"{side}_outcomes"].items():
                self._transfers.labels(*engine, side, outcome).inc(count)
        for key, count in data["failures"].items():
            self._failures.labels(*engine, *key.split(":", 1)).inc(count)
        self._wire_bytes.labels(*engine, "send").inc(data["sent_bytes"])
        self._wire_bytes.labels(*engine, "receive").inc(data["received_bytes"])
        for key, counter in self._tokens.items():
            counter.labels(*engine).inc(data[key])
        for key, histogram in self._histograms.items():
            child = histogram.labels(*engine)
            for value in data[key]:
                child.observe(value)
        if data["wire_s"]:
            self._goodput.labels(*engine).set(tally.goodput_bytes_per_s(data))
        for key, value in data[tally.GAUGES].items():
            self._gauges[key].labels(*engine).set(value)

    def _gauge(self, name: str, what: str) -> Any:
        return self._types[Gauge](
            name=_PREFIX + name, documentation=what, labelnames=self._labelnames, multiprocess_mode="mostrecent"
        )

    def _counter(self, name: str, what: str, *labels: str) -> Any:
        return self._types[Counter](name=_PREFIX + name, documentation=what, labelnames=[*self._labelnames, *labels])

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Any:
        return self._types[Histogram](
            name=_PREFIX + name, documentation=what, buckets=buckets, labelnames=self._labelnames
        )
