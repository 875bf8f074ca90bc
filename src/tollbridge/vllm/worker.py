"""The worker's half of the connector: carries out the orders of each step on a KVSender and a KVReceiver.

When may a layer of a chunk be published, with the prefix hit before it? vLLM hashes blocks when it schedules them, so a
hit may point at blocks that another request is computing, in an earlier step or in this very one. But the attention of
our own request in layer i reads all of them, so vLLM must have them written in layer i before that attention runs: in
this step every request's KV of layer i is written before anybody's attention of layer i, and steps run in order. So
once `save_kv_layer(i)` of a step has been called, and what was issued until then has been computed, tokens
[0, end of the chunk) of layer i are in memory: hits included. A request always computes at least one token, so
a hit never lacks the chunk that publishes it.

The hooks may be missing (a full CUDA graph has no Python in it), so `wait_for_save` publishes all layers of the step's
chunks again: the sweep. Publishing twice is harmless.

A send is reported when it has ended *and* the scheduler has closed it; a load when it has ended. Both are then
forgotten, so no id is reported twice, and none that the scheduler does not wait for: either would end the engine.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from tollbridge.errors import TransferError
from tollbridge.transfer.base import KVReceiver, KVSender, LoadRequest, Published, Reason, TransferEnd
from tollbridge.vllm.blocks import Pieces
from tollbridge.vllm.orders import Chunk, LoadOrder, SendOrder, StepOrders
from tollbridge.vllm.ready import LayerReady
from tollbridge.vllm.tally import Tally

logger = logging.getLogger(__name__)

# While requests are parked, vLLM steps for nothing 650 times a second, and each step keeps the interpreter lock for
# 0.4 ms from the threads that bring what it waits for. So an idle step waits for an end, and a new request with it.
_IDLE_WAIT_S = 0.001


@dataclass(kw_only=True)
class _Send:
    order: SendOrder
    attempt: int = 0  # goes up with each preemption: what was issued for an earlier one is not published
    closed: bool = False
    end: TransferEnd | None = None


@dataclass(kw_only=True)
class _Load:
    order: LoadOrder
    cancelled: bool = False

    @property
    def awaited(self) -> bool:
        return self.order.num_tokens > 0


@dataclass(frozen=True, kw_only=True)
class StepResults:
    """What a step reports: request ids, and blocks whose KV did not come."""

    sent: set[str]
    received: set[str]
    failed: set[str]  # of `received`
    failed_blocks: set[int]  # the same, as the blocks that they wait for
    ends: dict[str, TransferEnd]  # of `received`, by request id


class WorkerSide:
    """See the top of the file. One thread but for `ready`'s callbacks."""

    def __init__(
        self,
        *,
        sender: KVSender | None,
        receiver: KVReceiver | None,
        layers: Mapping[str, int],
        pieces: Pieces,
        ready: LayerReady,
        tp_rank: int = 0,
    ) -> None:
        self._sender = sender
        self._receiver = receiver
        self._layers = layers
        self._pieces = pieces
        self._ready = ready
        self._tp_rank = tp_rank
        self._lock = threading.Lock()  # between publishing and rewinding
        self._sends: dict[str, _Send] = {}  # by request id
        self._senders: dict[str, _Send] = {}  # the same by transfer id, until the transfer ended
        self._loads: dict[str, _Load] = {}  # by transfer id
        self._stillborn: list[TransferEnd] = []  # loads that could not even be opened
        self._orders = StepOrders()
        self._loads_started = True
        self.tally = Tally()
        self._ended = threading.Event()
        for side in (sender, receiver):
            if side is not None:
                side.set_listener(self._note_end)

    # ── a step, in vLLM's order ──

    def begin(self, orders: StepOrders) -> None:
        """Take the orders of a step, before anything of it runs. The same orders a second time are ignored."""
        if orders is self._orders:
            return
        self._orders, self._loads_started = orders, False
        for request_id in orders.rewinds:
            self._rewind(request_id)
        for order in orders.sends:
            self._register(order)
        for request_id, detail in orders.send_cancels:
            send = self._sends.get(request_id)
            if send is not None and self._sender is not None:
                self._sender.cancel(send.order.transfer_id, detail)
        for request_id in orders.send_closes:
            if request_id in self._sends:
                self._sends[request_id].closed = True
        if orders.shed is not None and self._sender is not None:
            shed = orders.shed
            self._sender.shed(shed.transfer_ids, shed.max_blocks, unsent_too=shed.unsent_too)
        self._cancel_loads(dict(orders.load_cancels))

    def start_loads(self) -> None:
        """Open the step's loads: their blocks belong to the receiver from now on."""
        if self._loads_started:
            return
        self._loads_started = True
        for order in self._orders.loads:
            self._open(order)

    def layer_saved(self, layer_name: str) -> None:
        """A layer of the step's forward pass was issued."""
        layer = self._layers.get(layer_name)
        if layer is not None and self._orders.chunks:
            self._publish(layer)

    def sweep(self) -> None:
        """The step's forward pass was issued: publish what no hook has."""
        if self._orders.chunks:
            self._publish(None)

    def finish(self) -> StepResults:
        """Return what has ended since the last step; an idle step gives the transfers a moment to end."""
        if self._orders.is_idle and (self._senders or self._loads) and not self._stillborn:
            self._ended.wait(_IDLE_WAIT_S)
        self._ended.clear()
        for end in self._sender.poll() if self._sender is not None else ():
            self._send_ended(end)
        sent = {request_id for request_id, send in self._sends.items() if send.closed and send.end is not None}
        for request_id in sent:
            del self._sends[request_id]
        results = StepResults(sent=sent, received=set(), failed=set(), failed_blocks=set(), ends={})
        for end in self._received():
            load = self._loads.pop(end.transfer_id, None)
            if load is not None and load.awaited:
                self._add_load(results, load, end)
        return results

    def close(self) -> None:
        """Stop publishing, then end every transfer and join the threads."""
        self._ready.close()
        for side in (self._sender, self._receiver):
            if side is not None:
                side.close()

    def check(self) -> None:
        """Raise AssertionError when the indexes, the sender or the receiver disagree."""
        assert all(send.end is None for send in self._senders.values()), "an ended send is still indexed"
        assert all(self._sends[send.order.request_id] is send for send in self._senders.values())
        for side in (self._sender, self._receiver):
            if side is not None:
                side.check()

    def _note_end(self) -> None:
        self._ended.set()

    # ── sends ──

    def _register(self, order: SendOrder) -> None:
        send = self._sends[order.request_id] = _Send(order=order)
        if self._sender is None:
            send.end = _failure(order.transfer_id, "send", "This worker does not send KV.")
            return
        try:
            self._sender.register(
                order.transfer_id, digest=order.digest, num_tokens=self._pieces.covering(order.num_tokens)
            )
            self._senders[order.transfer_id] = send
        except TransferError as error:
            logger.warning("%s", error)
            send.end = _failure(order.transfer_id, "send", str(error))

    def _rewind(self, request_id: str) -> None:
        """Take back what was published: on return nobody reads the blocks, which the next forward overwrites."""
        send = self._sends.get(request_id)
        if send is None or self._sender is None:
            return
        with self._lock:
            send.attempt += 1
            self._sender.rewind(send.order.transfer_id)

    def _publish(self, layer: int | None) -> None:
        sends = [
            (send, send.attempt, chunk)
            for chunk in self._orders.chunks
            if (send := self._sends.get(chunk.request_id)) is not None and send.end is None
        ]
        if sends:
            self._ready.after(partial(self._publish_now, sends, layer))

    def _publish_now(self, sends: Sequence[tuple[_Send, int, Chunk]], layer: int | None) -> None:
        assert self._sender is not None
        with self._lock:
            published = [
                Published(send.order.transfer_id, chunk.block_table, num_pieces)
                for send, attempt, chunk in sends
                if (num_pieces := self._pieces.ready(chunk.end_token, send.order.num_tokens))
                and attempt == send.attempt
            ]
            if published:
                self._sender.publish_all(published, layer=layer)

    def _send_ended(self, end: TransferEnd) -> None:
        send = self._senders.pop(end.transfer_id, None)
        if send is not None:
            send.end = end
            self.tally.sent(end)

    # ── loads ──

    def _open(self, order: LoadOrder) -> None:
        self._loads[order.transfer_id] = _Load(order=order)
        if self._receiver is None:
            self._stillborn.append(_failure(order.transfer_id, "receive", "This worker does not load KV."))
            return
        try:
            self._receiver.open(self._request(order))
        except (TransferError, ValueError) as error:
            logger.warning("%s", error)
            self._stillborn.append(_failure(order.transfer_id, "receive", str(error)))

    def _request(self, order: LoadOrder) -> LoadRequest:
        first, num_pieces = self._pieces.span(order.first_token, order.num_tokens)
        return LoadRequest(
            transfer_id=order.transfer_id,
            host=order.host,
            port=order.port + self._tp_rank,
            digest=order.digest,
            first_token=first,
            num_tokens=num_pieces,
            block_table=order.block_table,
        )

    def _cancel_loads(self, details: Mapping[str, str]) -> None:
        if not details:
            return
        for transfer_id, load in self._loads.items():
            if load.order.request_id in details:
                load.cancelled = True
                if self._receiver is not None:
                    self._receiver.cancel(transfer_id, details[load.order.request_id])

    def _received(self) -> list[TransferEnd]:
        ends, self._stillborn = self._stillborn, []
        return [*ends, *self._receiver.poll()] if self._receiver is not None else ends

    def _add_load(self, results: StepResults, load: _Load, end: TransferEnd) -> None:
        request_id = load.order.request_id
        results.received.add(request_id)
        results.ends[request_id] = self._load_ended(load, end)
        if end.outcome != "done" and not load.cancelled:
            results.failed.add(request_id)
            results.failed_blocks.update(self._blocks(load.order))

    def _load_ended(self, load: _Load, end: TransferEnd) -> TransferEnd:
        """Count an end and return it in tokens: the medium counts pieces."""
        done = end.outcome == "done"
        end = msgspec.structs.replace(end, num_tokens=load.order.num_tokens if done else 0)
        recomputed = 0 if done or load.cancelled else load.order.num_tokens
        self.tally.received(end, recomputed_tokens=recomputed)
        if recomputed:
            logger.warning(
                "The KV of request %s did not come (%s): %s Its %d tokens are recomputed.",
                load.order.request_id,
                end.reason,
                end.detail,
                recomputed,
            )
        return end

    def _blocks(self, order: LoadOrder) -> tuple[int, ...]:
        first = order.first_token // self._pieces.block_size
        return order.block_table[first : self._pieces.covering(order.first_token + order.num_tokens)]


def _failure(transfer_id: str, side: str, detail: str) -> TransferEnd:
    return msgspec.convert(
        {"transfer_id": transfer_id, "side": side, "outcome": "failed", "reason": Reason.PROTOCOL, "detail": detail},
        TransferEnd,
    )
