"""The engine's side of KV transfers: what is told to sender and receiver, and when blocks may go.

Prefill role. A send lives from `begin` until the sender's TransferEnd. What is published has been computed: prefix
hits at admission (blocks enter the prefix cache only when computed), each layer of a chunk as the runner finishes it,
and all layers after the step. A preempted send is rewound before its blocks go. A request that ends before its send
does leaves its blocks pinned. Pinned blocks have a bound: beyond it finished sends that decode has not fetched yet are
given up, and decode recomputes.

Decode role. A load lives from its opening (at admission, when the local prefix hit is known) until the receiver's
TransferEnd; the blocks belong to the receiver in between, also when the request is aborted. A request that needs
nothing, or dies before it was opened, opens an empty range, so that the prefill worker lets go of its blocks at once.

All methods but `claim` run in the engine's thread, under its lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from tollbridge.engine.requests import LiveRequest
from tollbridge.errors import RequestError, TransferError, UnsupportedError
from tollbridge.sched.plan import StepPlan
from tollbridge.sched.scheduler import Scheduler
from tollbridge.sched.sequence import State, TokenSequence
from tollbridge.transfer.base import KVReceiver, KVSender, LoadRequest, Published, TransferEnd
from tollbridge.wire.params import Role, TransferParams

VETOED = "vetoed"  # reason of a load that decode did not want


def _no_layer_hook(layer: int) -> None:
    """Nothing of this step is sent."""


def _maybe_veto(live: LiveRequest) -> TransferEnd | None:
    """Return how a load ends that is opened empty although decode lacks something: it chose to compute that."""
    num_lacking = live.sequence.num_prompt_tokens - 1 - live.cached_tokens
    if not 0 < num_lacking <= live.sequence.veto_tokens:
        return None
    detail = (
        f"Decode had all but {num_lacking} tokens of the prompt, and to compute them is quicker than to fetch them."
    )
    return TransferEnd(transfer_id=live.transfer_id, side="receive", outcome="done", reason=VETOED, detail=detail)


@dataclass(frozen=True, kw_only=True)
class DeskStatistics:
    """Gauges of now, and a counter since start."""

    num_sends: int
    num_finished_sends: int  # of those: their request has ended, decode has not fetched
    num_loads: int
    recomputed_tokens_total: int  # because a load failed


class TransferDesk:
    """Open sends and loads, by request."""

    def __init__(self, sender: KVSender | None, receiver: KVReceiver | None) -> None:
        self._sender = sender
        self._receiver = receiver
        self._claims: set[tuple[Role, str]] = set()  # transfers between submit and their end
        self._claims_lock = threading.Lock()
        self._sends: dict[str, LiveRequest] = {}  # by transfer id, until the TransferEnd
        self._sends_by_request: dict[str, LiveRequest] = {}  # the same, while the request lives
        self._finished: dict[str, None] = {}  # sends whose request has ended, oldest first
        self._loads: dict[str, LiveRequest] = {}  # by transfer id, opened and not ended
        self.recomputed_tokens_total = 0

    def set_listener(self, notify: Callable[[], None]) -> None:
        """Call `notify` from any thread when `poll` has something to do."""
        for side in (self._sender, self._receiver):
            if side is not None:
                side.set_listener(notify)

    def claim(self, params: TransferParams) -> None:
        """Reserve a transfer for a new request (any thread); RequestError when this worker cannot serve the role."""
        if (self._sender if params.role == "prefill" else self._receiver) is None:
            raise UnsupportedError(
                f"This worker has no KV transfer configured and cannot serve the {params.role} role: "
                "set `kv` of the worker in the cluster file.",
                param="kv_transfer_params",
            )
        if params.tp_size != 1:
            raise UnsupportedError(
                f"The peer has tensor parallel size {params.tp_size}, but the embedded engine exchanges KV only with "
                "size 1.",
                param="kv_transfer_params",
            )
        key = (params.role, params.transfer_id)
        with self._claims_lock:
            if key in self._claims:
                raise RequestError(
                    f"Transfer {params.transfer_id} already has a {params.role} request on this worker: "
                    "use a new transfer_id for each request.",
                    param="kv_transfer_params",
                )
            self._claims.add(key)

    def begin(self, live: LiveRequest) -> None:
        """Announce the send of a request that was just queued; TransferError when the sender does not take it."""
        if self._sender is None or live.request.transfer is None or live.request.transfer.role != "prefill":
            return
        try:
            self._sender.register(live.transfer_id, digest=live.digest, num_tokens=live.sequence.num_prompt_tokens)
        except TransferError:
            self._drop_claim(live)
            raise
        self._sends[live.transfer_id] = self._sends_by_request[live.request.request_id] = live

    def admitted(self, live: LiveRequest) -> None:
        """A sequence runs: publish what it found in the prefix cache, or say that nothing has to be loaded."""
        sequence = live.sequence
        if self._is_unopened_load(live):
            self._open(live, num_tokens=0)
            live.transfer_end = _maybe_veto(live)  # the request may be over before prefill has heard of it
        elif live.request.request_id in self._sends_by_request and sequence.num_hit_tokens:
            assert self._sender is not None
            num_tokens = min(sequence.num_hit_tokens, sequence.num_prompt_tokens)
            self._sender.publish(live.transfer_id, sequence.block_table, num_tokens)

    def parked(self, live: LiveRequest) -> None:
        """A sequence has its blocks: ask for the KV that it lacks."""
        self._open(live, num_tokens=live.sequence.num_lacking)

    def revoked(self, live: LiveRequest) -> None:
        """A parked sequence must give its blocks back, which it does when its load has ended."""
        assert self._receiver is not None
        self._receiver.cancel(live.transfer_id, "Its blocks are needed for a prefill that another worker waits for.")

    def layer_hook(self, plan: StepPlan) -> Callable[[int], None]:
        """Return the callback that publishes each layer of the plan as it is computed."""
        sender, sends = self._sender, self._chunks_to_send(plan)
        if sender is None or not sends:
            return _no_layer_hook

        def publish_layer(layer: int) -> None:
            sender.publish_all(sends, layer=layer)

        return publish_layer

    def computed(self, plan: StepPlan) -> None:
        """Publish every layer of a plan that ran: the sweep behind the layer hook."""
        if self._sender is not None and self._sends_by_request:
            self._sender.publish_all(self._chunks_to_send(plan))

    def before_preempt(self, sequence: TokenSequence) -> None:
        """Take back what was published, before the blocks go."""
        live = self._sends_by_request.get(sequence.request_id)
        if live is not None and self._sender is not None:
            self._sender.rewind(live.transfer_id)

    def release(self, transfer_id: str) -> None:
        """Cancel a send that nobody will fetch: its end unpins the blocks. Unknown ids are ignored."""
        if self._sender is not None and transfer_id in self._sends:
            self._sender.cancel(transfer_id, "The router said that nobody will fetch it.")

    def ending(self, live: LiveRequest, *, complete: bool, detail: str = "") -> bool:
        """A request is about to end; return whether its blocks stay in use by a transfer.

        An incomplete one (aborted, failed) cancels its transfer.
        """
        if self._sends_by_request.pop(live.request.request_id, None) is not None:
            assert self._sender is not None
            if complete:
                self._finished[live.transfer_id] = None
            else:
                self._sender.cancel(live.transfer_id, detail)
            return True
        if live.sequence.state is State.PARKED:
            assert self._receiver is not None
            self._receiver.cancel(live.transfer_id, detail)
            return True
        if self._is_unopened_load(live):
            self._open(live, num_tokens=0)
        return False

    def shed(self, max_blocks: int, *, unsent_too: bool = False) -> None:
        """Give up finished sends that decode has not opened (or fetched), until they hold at most `max_blocks`."""
        if self._sender is not None and self._finished:
            self._sender.shed(list(self._finished), max_blocks, unsent_too=unsent_too)

    def poll(self, scheduler: Scheduler, now_s: float) -> None:
        """Take the ends of transfers: unpark, unpin."""
        for end in self._sender.poll() if self._sender else ():
            live = self._sends.pop(end.transfer_id, None)
            self._finished.pop(end.transfer_id, None)
            if live is not None:
                self._sends_by_request.pop(live.request.request_id, None)
                self._ended(live, scheduler)
        for end in self._receiver.poll() if self._receiver else ():
            live = self._loads.pop(end.transfer_id, None)
            if live is not None:
                live.transfer_end = live.transfer_end or end
                if live.sequence.state is State.PARKED:
                    self._loaded(live, scheduler, now_s)
                self._ended(live, scheduler)

    def close(self) -> None:
        """Close sender and receiver: every open transfer ends."""
        for side in (self._sender, self._receiver):
            if side is not None:
                side.close()

    def statistics(self) -> DeskStatistics:
        return DeskStatistics(
            num_sends=len(self._sends),
            num_finished_sends=len(self._finished),
            num_loads=len(self._loads),
            recomputed_tokens_total=self.recomputed_tokens_total,
        )

    def check(self) -> None:
        """Raise AssertionError when an invariant of this desk, the sender or the receiver is broken."""
        assert {("prefill", transfer_id) for transfer_id in self._sends} <= self._claims, "an unclaimed send"
        assert {("decode", transfer_id) for transfer_id in self._loads} <= self._claims, "an unclaimed load"
        assert all(self._sends.get(live.transfer_id) is live for live in self._sends_by_request.values())
        assert self._finished.keys() <= self._sends.keys(), "a finished send is not among the sends"
        for side in (self._sender, self._receiver):
            if side is not None:
                side.check()

    def _chunks_to_send(self, plan: StepPlan) -> list[Published]:
        """Return (transfer id, block table, prompt tokens computed after this step) for each send in the plan."""
        if not self._sends_by_request:
            return []
        sends = []
        for chunk in plan.chunks:
            live = self._sends_by_request.get(chunk.request_id)
            if live is not None and chunk.first_token < live.sequence.num_prompt_tokens:
                num_tokens = min(chunk.first_token + len(chunk.token_ids), live.sequence.num_prompt_tokens)
                sends.append(Published(live.transfer_id, live.sequence.block_table, num_tokens))
        return sends

    def _is_unopened_load(self, live: LiveRequest) -> bool:
        transfer = live.request.transfer
        return (
            transfer is not None
            and transfer.role == "decode"
            and live.transfer_end is None
            and transfer.transfer_id not in self._loads
        )

    def _open(self, live: LiveRequest, *, num_tokens: int) -> None:
        transfer, sequence = live.request.transfer, live.sequence
        assert transfer is not None and self._receiver is not None
        self._loads[transfer.transfer_id] = live
        self._receiver.open(
            LoadRequest(
                transfer_id=transfer.transfer_id,
                host=transfer.host,
                port=transfer.port,
                digest=live.digest,
                first_token=sequence.num_hit_tokens,
                num_tokens=num_tokens,
                block_table=sequence.block_table,
            )
        )

    def _loaded(self, live: LiveRequest, scheduler: Scheduler, now_s: float) -> None:
        assert live.transfer_end is not None
        num_tokens = live.sequence.num_lacking
        accepted = live.transfer_end.outcome == "done"
        if accepted:
            live.loaded_tokens = num_tokens
        else:
            self.recomputed_tokens_total += num_tokens
        live.can_compute(now_s)
        scheduler.loaded(live.sequence, accepted=accepted)

    def _ended(self, live: LiveRequest, scheduler: Scheduler) -> None:
        if live.sequence.state is State.PINNED:
            scheduler.unpin(live.sequence)
        self._drop_claim(live)

    def _drop_claim(self, live: LiveRequest) -> None:
        assert live.request.transfer is not None
        with self._claims_lock:
            self._claims.discard((live.request.transfer.role, live.transfer_id))
