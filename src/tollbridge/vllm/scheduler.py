"""The scheduler's half of the connector: what each request sends or loads, step by step.

Prefill leg (a *send*). Announced as soon as it is queued, so that decode learns it is known. Each step in which a chunk
of its prompt is scheduled names the chunk, with the blocks of all that came before it. When the request ends, however,
its blocks stay with us until the worker has reported the end of the send: always, also when the send has ended before
the request, so that there is one way for blocks to become free, and the worker may report an id only after it was
closed here.

    queued ─> computing (chunks; a preemption starts over) ─> closed (request ended) ─> gone (worker reported the end)

Decode leg (a *load*). vLLM asks how much is elsewhere, perhaps several times, and then allocates: that opens the load,
once. A request that needs nothing, or ends before it was opened, opens an empty range: prefill lets go at once. An
aborted one cancels, and its blocks stay with the worker until it has reported the end.

    queued ─> loading ─> settled (worker reported the end; failed: vLLM recomputes) ─> gone

Several engine requests may carry the same transfer (n > 1): the first is the leader and loads; the others wait until
the leader has settled, and then find its blocks in the prefix cache. One may come after that: they reach the engine one
by one.

Blocks of closed sends are *pinned*. They have a bound: beyond it the newest send that nobody fetches is given up, and
decode recomputes. The same when something waits here for room and nothing runs or loads: then pinned blocks may be all
that it waits for, held for a decode worker that itself waits elsewhere. The router may also release a send by name.

Nothing here may raise on account of what a request contains: an exception ends the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tollbridge.transfer.base import TransferEnd
from tollbridge.vllm.admission import Admission, Leg, Refused, Release
from tollbridge.vllm.orders import Chunk, LoadOrder, SendOrder, StepOrders
from tollbridge.vllm.pinned import Pinned
from tollbridge.vllm.prompts import Prompts
from tollbridge.vllm.report import load_report, refused_report, send_report

_MAX_SETTLED = 512  # transfers whose end is remembered for siblings that come late
_COMPLETE = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"})


@dataclass(kw_only=True)
class Send:
    """A prefill leg whose request lives."""

    leg: Leg
    block_table: list[int] = field(default_factory=list)
    end_token: int = 0  # computed, once the steps scheduled so far have run
    cached_tokens: int = 0  # prefix hit


@dataclass(kw_only=True)
class Load:
    """A decode leg."""

    leg: Leg
    leader: Load | None = None  # another request that loads the same
    opened: bool = False  # the worker has been told, of a range or of an empty one
    settled: bool = False  # nothing will arrive any more
    gone: bool = False  # the request ended before it settled
    cached_tokens: int = 0
    num_tokens: int = 0  # asked for
    end: TransferEnd | None = None


class SchedulerSide:
    """See the top of the file. One thread: the engine's."""

    def __init__(self, admission: Admission, *, max_pinned_blocks: int = 0) -> None:
        self._admission = admission
        self._pinned = Pinned(max_pinned_blocks)  # sends whose request has ended
        self._prompts = Prompts()
        self._told: dict[str, int] = {}  # gauges as last reported
        self._changed = False  # a request is gone, and no step has run since
        self._orders = StepOrders()
        self._sends: dict[str, Send] = {}  # by request id, until the request ends
        self._loads: dict[str, Load] = {}  # by request id, until the request ended and the load settled
        self._refused: dict[str, Refused] = {}
        self._sending: set[str] = set()  # transfer ids in use on the send side
        self._leaders: dict[str, Load] = {}  # transfer id -> the load that opens it
        self._settled: dict[str, Load] = {}  # the latest of those that were leaders

    # ── a request comes ──

    def queued(self, request: Any) -> None:
        """Take a new request."""
        leg = self._admission.admit(request)
        self._prompts.add(request)
        if isinstance(leg, Refused):
            self._refused[request.request_id] = leg
        elif isinstance(leg, Release):
            self._release(leg.transfer_id)
        elif leg is not None and leg.params.role == "prefill":
            self._queue_send(leg)
        elif leg is not None:
            self._queue_load(leg)

    def lacking(self, request_id: str, num_computed_tokens: int) -> int | None:
        """Return how many tokens after `num_computed_tokens` are to be loaded; None: ask again next step.

        The last prompt token is not among them: decode computes it anyway, because it needs its logits, and with
        it the block of its own that a prompt one token longer than a block's edge would need is not shipped.
        """
        load = self._loads.get(request_id)
        if load is None or load.opened:
            return 0
        load.cached_tokens = num_computed_tokens
        if load.leader is not None:
            return 0 if load.leader.settled else None
        return max(0, load.leg.num_tokens - 1 - num_computed_tokens)

    def allocated(self, request_id: str, block_table: Sequence[int], num_external_tokens: int) -> None:
        """Take the blocks of a request; the first time they are for what it lacks."""
        load = self._loads.get(request_id)
        if load is None or load.opened or load.leader is not None:
            return
        load.num_tokens = num_external_tokens
        self._prompts.loading(request_id, num_external_tokens)
        self._open(load, tuple(block_table))

    # ── a step ──

    def step(self, output: Any) -> StepOrders:
        """Return the orders of the step that `output` (vLLM's SchedulerOutput) describes."""
        self._changed = False
        for request_id in output.preempted_req_ids or ():
            self._preempt(request_id)
        self._prompts.preempted(output.preempted_req_ids or ())
        self._prompts.scheduled(output)
        if self._sends:
            self._add_chunks(output)
        if self._starved(output):
            self._orders.shed = self._pinned.make_room()
        orders, self._orders = self._orders, StepOrders()
        orders.is_idle = not output.num_scheduled_tokens
        return orders

    def reported(self, sent: Iterable[str], received: Iterable[str], ends: dict[str, TransferEnd]) -> None:
        """Take what the workers reported, just before vLLM frees or resumes the requests."""
        for request_id in received:
            load = self._loads.get(request_id)
            if load is not None:
                load.end = ends.get(request_id)
                self._settle(load)
                if load.gone:
                    del self._loads[request_id]
        for request_id in sent:
            self._sending.discard(self._pinned.remove(request_id))

    # ── a request goes ──

    def finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the blocks stay in use, and the report for the client of this leg (the router)."""
        request_id = request.request_id
        self._prompts.remove(request_id)
        self._changed = True
        if request_id in self._sends:
            return True, self._close_send(request_id, request.status.name)
        if request_id in self._loads:
            return False, self._close_load(request_id, request.status.name)
        refused = self._refused.pop(request_id, None)
        return False, refused_report(refused) if refused is not None else None

    @property
    def pending(self) -> bool:
        """Whether the engine must go on stepping although no request runs."""
        return bool(self._pinned or self._orders or self._changed)

    def gauges(self) -> dict[str, int]:
        """Return what a router wants to know of this worker, as far as it has changed since the last call."""
        now = {
            "pinned_blocks": self._pinned.num_blocks,
            "max_pinned_blocks": self._pinned.max_blocks,
            "waiting_prefill_tokens": self._prompts.num_tokens,
        }
        changed = {name: value for name, value in now.items() if self._told.get(name) != value}
        self._told = now
        return changed

    def check(self) -> None:
        """Raise AssertionError when the indexes disagree."""
        self._pinned.check()
        self._prompts.check()
        assert not any(request_id in self._pinned for request_id in self._sends), "a send is both open and closed"
        using = {send.leg.params.transfer_id for send in self._sends.values()} | set(self._pinned.transfer_ids)
        assert using == self._sending, "transfer ids in use disagree"
        for transfer_id, load in self._leaders.items():
            assert load.leader is None and load.leg.params.transfer_id == transfer_id
            assert not load.settled, "a settled load still leads"
        assert len(self._settled) <= _MAX_SETTLED and all(load.settled for load in self._settled.values())

    # ── inside ──

    def _queue_send(self, leg: Leg) -> None:
        transfer_id = leg.params.transfer_id
        if transfer_id in self._sending:
            detail = f"Transfer {transfer_id} already has a prefill request here: ids are used once."
            self._refused[leg.request_id] = Refused(transfer_id=transfer_id, role="prefill", detail=detail)
            return
        self._sending.add(transfer_id)
        self._sends[leg.request_id] = Send(leg=leg)
        self._orders.sends.append(
            SendOrder(request_id=leg.request_id, transfer_id=transfer_id, digest=leg.digest, num_tokens=leg.num_tokens)
        )

    def _queue_load(self, leg: Leg) -> None:
        transfer_id = leg.params.transfer_id
        leader = self._leaders.get(transfer_id) or self._settled.get(transfer_id)
        if leader is not None and leader.leg.digest != leg.digest:
            detail = f"Transfer {transfer_id} loads another prompt: the router splits prompt lists."
            self._refused[leg.request_id] = Refused(transfer_id=transfer_id, role="decode", detail=detail)
            return
        load = self._loads[leg.request_id] = Load(leg=leg, leader=leader)
        if leader is None:
            self._leaders[transfer_id] = load

    def _open(self, load: Load, block_table: tuple[int, ...]) -> None:
        load.opened = True
        leg = load.leg
        self._orders.loads.append(
            LoadOrder(
                request_id=leg.request_id,
                transfer_id=leg.params.transfer_id,
                host=leg.params.host,
                port=leg.params.port,
                digest=leg.digest,
                first_token=load.cached_tokens if load.num_tokens else 0,
                num_tokens=load.num_tokens,
                block_table=block_table if load.num_tokens else (),
            )
        )
        if not load.num_tokens:
            self._settle(load)

    def _release(self, transfer_id: str) -> None:
        """Cancel a send that nobody will fetch; what is unknown has ended already."""
        request_id = self._pinned.maybe_request(transfer_id)
        if request_id is not None:
            self._orders.send_cancels.append((request_id, "The router said that nobody will fetch it."))

    def _starved(self, output: Any) -> bool:
        """Whether pinned blocks may be all that somebody waits for."""
        if not self._pinned or output.num_scheduled_tokens or not self._prompts.starving:
            return False
        return not any(load.opened and not load.settled for load in self._loads.values())

    def _settle(self, load: Load) -> None:
        load.settled = True
        transfer_id = load.leg.params.transfer_id
        if self._leaders.pop(transfer_id, None) is not None:
            self._settled[transfer_id] = load
            if len(self._settled) > _MAX_SETTLED:
                del self._settled[next(iter(self._settled))]

    def _preempt(self, request_id: str) -> None:
        """Take back what was published: the blocks are free, and may be written in this very step.

        Also when the request has ended in between: a cancellation is only posted to the sender, a rewind waits for it.
        """
        send = self._sends.get(request_id)
        if send is not None:
            send.end_token, send.block_table = 0, []
        if send is not None or request_id in self._pinned:
            self._orders.rewinds.append(request_id)

    def _add_chunks(self, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            self._schedule(output, new.req_id, new.num_computed_tokens, new.block_ids, replace=True)
        cached = output.scheduled_cached_reqs
        for request_id, start, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            self._schedule(output, request_id, start, blocks, replace=request_id in cached.resumed_req_ids)

    def _schedule(
        self, output: Any, request_id: str, start: int, blocks: Sequence[Sequence[int]] | None, *, replace: bool
    ) -> None:
        """Note the chunk of one request: tokens [start, start + scheduled), and its new blocks (or all of them)."""
        send = self._sends.get(request_id)
        if send is None:
            return
        if replace:
            send.block_table, send.cached_tokens = [], start
        if blocks is not None:
            send.block_table.extend(blocks[0])
        num_tokens = send.leg.num_tokens
        if start >= num_tokens:
            return
        send.end_token = min(start + output.num_scheduled_tokens[request_id], num_tokens)
        self._orders.chunks.append(
            Chunk(request_id=request_id, block_table=tuple(send.block_table), end_token=send.end_token)
        )

    def _close_send(self, request_id: str, status: str) -> dict[str, Any]:
        send = self._sends.pop(request_id)
        self._pinned.add(request_id, send.leg.params.transfer_id, send.block_table)
        self._orders.send_closes.append(request_id)
        self._orders.shed = self._pinned.over_bound() or self._orders.shed
        # a request that was preempted in its last step may end without KV (vLLM 0.25): its end_token is 0
        if status not in _COMPLETE or send.end_token < send.leg.num_tokens:
            self._orders.send_cancels.append((request_id, f"The prefill request ended early ({status})."))
        return send_report(send.leg, cached_tokens=send.cached_tokens, computed_tokens=send.end_token)

    def _close_load(self, request_id: str, status: str) -> dict[str, Any]:
        load = self._loads[request_id]
        if load.leader is None and not load.opened:
            self._open(load, ())
        if load.settled or load.leader is not None:
            del self._loads[request_id]
        else:
            load.gone = True
            self._orders.load_cancels.append((request_id, f"The decode request ended early ({status})."))
        shared = load.leader or load  # the answer of several choices has one report: that of the load they share
        return load_report(load.leg, cached_tokens=shared.cached_tokens, num_tokens=shared.num_tokens, end=shared.end)
