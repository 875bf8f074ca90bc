"""`TollbridgeConnector`: vLLM's KV connector interface (v1), each method one call into scheduler.py or worker.py.

    --kv-transfer-config '{"kv_connector": "TollbridgeConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "tollbridge.vllm.connector", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_host": "10.0.0.1", "kv_port": 7801}}'

Written for vLLM 0.31 and 0.25.1. Where they differ: 0.25 calls `get_finished` and learns of failed loads by block, 0.31
calls `get_transfer_results` and learns of them by request (by block it would go on counting the failed tokens as cached
in `usage`); 0.25 calls `start_load_kv` before the forward pass and 0.31 after it, and a load may start at either time;
0.25 skips `wait_for_save` in steps without a forward pass, in which there is nothing to publish.
"""

# vLLM is not installed where types are checked: its classes are Any.
# mypy: disable-error-code="import-not-found,misc"
from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from tollbridge.clock import SystemClock
from tollbridge.transfer.base import TransferEnd
from tollbridge.transfer.outboard import make_receiver, make_sender
from tollbridge.vllm import installed, support, tally
from tollbridge.vllm.admission import Admission
from tollbridge.vllm.blocks import Pieces, block_memory
from tollbridge.vllm.layout import CacheLayout, read_layout
from tollbridge.vllm.orders import StepOrders
from tollbridge.vllm.ready import AtOnce
from tollbridge.vllm.scheduler import SchedulerSide
from tollbridge.vllm.settings import ConnectorSettings, read_settings
from tollbridge.vllm.stats import TollbridgePromMetrics, TollbridgeStats
from tollbridge.vllm.traced import TracedScheduler, TracedWorker
from tollbridge.vllm.worker import StepResults, WorkerSide

logger = logging.getLogger(__name__)


@dataclass
class StepMetadata(base.KVConnectorMetadata):
    """The orders of one step, as vLLM carries them."""

    orders: StepOrders


@dataclass
class EndsMetadata(base.KVConnectorWorkerMetadata):
    """How the loads of a step's finished requests ended, by request id."""

    ends: dict[str, TransferEnd] = field(default_factory=dict)

    def aggregate(self, other: EndsMetadata) -> EndsMetadata:
        """Merge the ends of two tensor parallel ranks: a load is done when it is done on both."""
        for request_id, end in other.ends.items():
            mine = self.ends.get(request_id)
            if mine is None or mine.outcome == "done":
                self.ends[request_id] = end
        return self


class TollbridgeConnector(base.KVConnectorBase_V1):
    """See the top of the file. vLLM makes one per role and process."""

    def __init__(self, vllm_config: Any, role: base.KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        installed.use_vllms_log()
        transfer_config = vllm_config.kv_transfer_config
        self._settings = read_settings(transfer_config.kv_connector_extra_config, os.environ)
        _check_start(vllm_config, kv_cache_config, self._settings)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._results: StepResults | None = None
        self._failed_blocks: set[int] = set()
        self._ends = EndsMetadata()  # of the ranks that have reported, until all have
        if role is base.KVConnectorRole.SCHEDULER:
            admission = Admission(
                secret=self._settings.secret,
                clock=SystemClock(),
                tp_size=vllm_config.parallel_config.tensor_parallel_size,
                sends=transfer_config.is_kv_producer,
                loads=transfer_config.is_kv_consumer,
            )
            max_pinned_blocks = max(1, int(self._settings.max_pinned_fraction * kv_cache_config.num_blocks))
            trace = self._settings.maybe_trace("scheduler")
            make_scheduler = SchedulerSide if trace is None else partial(TracedScheduler, trace=trace)
            self._scheduler = make_scheduler(admission, max_pinned_blocks=max_pinned_blocks)

    # ── scheduler's process ──

    def on_new_request(self, request: Any) -> None:
        self._at_scheduler.queued(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        lacking = self._at_scheduler.lacking(request.request_id, num_computed_tokens)
        return lacking, bool(lacking)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._at_scheduler.allocated(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return StepMetadata(self._at_scheduler.step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, EndsMetadata):
            self._ends.aggregate(meta)
        received = connector_output.finished_recving or ()
        ends = {key: self._ends.ends.pop(key) for key in received if key in self._ends.ends}
        self._at_scheduler.reported(connector_output.finished_sending or (), received, ends)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._at_scheduler.finished(request)

    def has_pending_push_work(self) -> bool:
        return self._at_scheduler.pending

    # ── worker's process ──

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        config, settings = self._vllm_config, self._settings
        layout = read_layout(
            kv_caches, num_blocks=self._kv_cache_config.num_blocks, backend=installed.attention_backend(config)
        )
        rank = installed.tensor_parallel_rank()
        memory = block_memory(
            layout.tensors, layout.regions, num_blocks=layout.num_blocks, block_bytes=layout.block_bytes
        )
        fingerprint = installed.fingerprint(config, layout, tp_rank=rank)
        options = settings.options(rank)
        transfer_config = config.kv_transfer_config
        sender = make_sender(memory, fingerprint, options) if transfer_config.is_kv_producer else None
        receiver = make_receiver(memory, fingerprint, options) if transfer_config.is_kv_consumer else None
        trace = settings.maybe_trace(f"worker{rank}")
        make_worker = WorkerSide if trace is None else partial(TracedWorker, trace=trace)
        self._worker = make_worker(
            sender=sender,
            receiver=receiver,
            layers=layout.layers,
            pieces=Pieces(config.cache_config.block_size),
            ready=AtOnce(),
            tp_rank=rank,
        )
        self._note_facts(layout, [side.statistics().io for side in (sender, receiver) if side is not None])
        where = ":".join(map(str, sender.address)) if sender is not None else "no port (kv_consumer)"
        logger.info(
            "Tollbridge listens for KV on %s: %d layers, %d blocks of %d tokens, %d bytes per block and layer (%s).",
            where, len(layout.regions), layout.num_blocks, config.cache_config.block_size, layout.block_bytes,
            layout.description,
        )  # fmt: skip

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._at_worker.begin(kv_connector_metadata.orders)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin(connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._at_worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are asynchronous, no forward pass of this step reads what still arrives."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._at_worker.layer_saved(layer_name)

    def wait_for_save(self) -> None:
        self._at_worker.sweep()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._results = results = self._at_worker.finish()
        self._failed_blocks = results.failed_blocks
        return results.sent or None, results.received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        self._results = results = self._at_worker.finish()
        self._failed_blocks = set()
        return base.KVConnectorTransferResults(
            finished_sending=results.sent, finished_recving=results.received, failed_recving=results.failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._failed_blocks

    def build_connector_worker_meta(self) -> EndsMetadata | None:
        if self._results is None or not self._results.ends:
            return None
        return EndsMetadata(self._results.ends)

    def get_kv_connector_stats(self) -> TollbridgeStats | None:
        data = self._worker.tally.take() if self._worker is not None else None
        gauges = self._scheduler.gauges() if self._scheduler is not None else None
        if gauges:
            data = {**tally.empty(), tally.GAUGES: gauges}
        return TollbridgeStats(data=data) if data is not None else None

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    # ── vLLM's API server ──

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TollbridgeStats:
        return TollbridgeStats(data=data) if data is not None else TollbridgeStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TollbridgePromMetrics:
        return TollbridgePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ── inside ──

    def _note_facts(self, layout: CacheLayout, io: Sequence[str]) -> None:
        """Let routers know what a token of KV weighs on the wire, all ranks together, and the budget of a step.

        `io` says who moves the KV, of each side.
        """
        config, tally_ = self._vllm_config, self._at_worker.tally
        block_bytes = layout.block_bytes * len(layout.regions) * config.parallel_config.tensor_parallel_size
        tally_.note("kv_bytes_per_token", block_bytes / config.cache_config.block_size)
        tally_.note("max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
        tally_.note("io_processes", io.count("process"))

    @property
    def _at_scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None, "a scheduler's method was called in a worker"
        return self._scheduler

    @property
    def _at_worker(self) -> WorkerSide:
        assert self._worker is not None, "a worker's method was called before register_kv_caches"
        return self._worker


def _check_start(vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings) -> None:
    warning = support.check_version(installed.version(), allow_untested=settings.allow_untested_vllm)
    if warning is not None:
        logger.warning("%s", warning)
    support.check_deployment(vllm_config, kv_cache_config)
    if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        logger.warning(
            'kv_load_failure_policy is "%s": a request whose KV does not come will fail. Set it to "recompute".',
            vllm_config.kv_transfer_config.kv_load_failure_policy,
        )
