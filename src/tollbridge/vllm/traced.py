"""Both halves of the connector with a trace: where does the time of a split go? See obs/trace.py.

Scheduler's events: queued, scheduled (each step: what runs, which loads it opens), reported, finished. Worker's: begin
and finish (the host's part of a step), load, layer and sweep (a layer of a chunk was issued), ended (a transfer, with
its own times). Joined by transfer id, and by time with the other worker's and the client's, they make one timeline.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from tollbridge.obs.trace import Trace
from tollbridge.transfer.base import KVReceiver, KVSender, TransferEnd
from tollbridge.vllm.admission import Admission
from tollbridge.vllm.blocks import Pieces
from tollbridge.vllm.orders import StepOrders
from tollbridge.vllm.ready import LayerReady
from tollbridge.vllm.scheduler import SchedulerSide
from tollbridge.vllm.worker import StepResults, WorkerSide


class TracedScheduler(SchedulerSide):
    """A SchedulerSide that notes what happens when."""

    def __init__(self, admission: Admission, *, max_pinned_blocks: int = 0, trace: Trace) -> None:
        super().__init__(admission, max_pinned_blocks=max_pinned_blocks)
        self._trace = trace

    def queued(self, request: Any) -> None:
        super().queued(request)
        leg = self._sends.get(request.request_id) or self._loads.get(request.request_id)
        transfer = leg.leg.params.transfer_id if leg is not None else ""
        self._trace.note("queued", request=request.request_id, transfer=transfer)

    def step(self, output: Any) -> StepOrders:
        orders = super().step(output)
        self._trace.note(
            "scheduled",
            tokens=dict(output.num_scheduled_tokens),
            loads=[load.transfer_id for load in orders.loads],
        )
        return orders

    def reported(self, sent: Iterable[str], received: Iterable[str], ends: dict[str, TransferEnd]) -> None:
        sent, received = list(sent), list(received)
        super().reported(sent, received, ends)
        if sent or received:
            self._trace.note("reported", sent=sent, received=received)

    def finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        self._trace.note("finished", request=request.request_id)
        return super().finished(request)


class TracedWorker(WorkerSide):
    """A WorkerSide that notes what happens when."""

    def __init__(
        self,
        *,
        sender: KVSender | None,
        receiver: KVReceiver | None,
        layers: Mapping[str, int],
        pieces: Pieces,
        ready: LayerReady,
        tp_rank: int,
        trace: Trace,
    ) -> None:
        super().__init__(sender=sender, receiver=receiver, layers=layers, pieces=pieces, ready=ready, tp_rank=tp_rank)
        self._trace = trace
        self._ended_s: dict[str, deque[float]] = {"send": deque(), "receive": deque()}
        for side, name in ((sender, "send"), (receiver, "receive")):
            if side is not None:
                side.set_listener(partial(self._note_time, self._ended_s[name]))

    def begin(self, orders: StepOrders) -> None:
        if orders is not self._orders:
            self._trace.note("begin", sends=[order.transfer_id for order in orders.sends])
        super().begin(orders)

    def start_loads(self) -> None:
        opening = [order.transfer_id for order in self._orders.loads] if not self._loads_started else []
        super().start_loads()
        for transfer in opening:
            self._trace.note("load", transfer=transfer)

    def layer_saved(self, layer_name: str) -> None:
        super().layer_saved(layer_name)
        if self._orders.chunks:
            self._trace.note("layer", layer=self._layers.get(layer_name))

    def sweep(self) -> None:
        super().sweep()
        if self._orders.chunks:
            self._trace.note("sweep", chunks=[(chunk.request_id, chunk.end_token) for chunk in self._orders.chunks])

    def finish(self) -> StepResults:
        results = super().finish()
        self._trace.note("finish", sent=sorted(results.sent), received=sorted(results.received))
        return results

    def _send_ended(self, end: TransferEnd) -> None:
        self._trace_end(end)
        super()._send_ended(end)

    def _received(self) -> list[TransferEnd]:
        ends = super()._received()
        for end in ends:
            self._trace_end(end)
        return ends

    def _note_time(self, times: deque[float]) -> None:
        times.append(time.monotonic())
        self._note_end()

    def _trace_end(self, end: TransferEnd) -> None:
        times = self._ended_s[end.side]  # ends come in the order in which the ledger told of them
        self._trace.note(
            "ended",
            transfer=end.transfer_id,
            side=end.side,
            outcome=end.outcome,
            ended_s=round(times.popleft(), 6) if times else None,
            wait_s=end.wait_s,
            wire_s=end.wire_s,
            total_s=end.total_s,
            num_frames=end.num_frames,
            payload_bytes=end.payload_bytes,
        )
