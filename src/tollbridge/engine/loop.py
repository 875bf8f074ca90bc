"""The engine's loop body: `schedule -> run -> postprocess`. One thread calls it; another may look on under the lock.

The lock is held while requests, blocks or transfers change hands, and not while the model runs or sinks are called. So
`statistics` waits for microseconds, never for a forward pass, and a sink may call the engine.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tollbridge.clock import Clock
from tollbridge.config.cluster import EngineConfig
from tollbridge.engine.base import EngineStatistics, ModelInfo, Sink, StepOutput
from tollbridge.engine.counters import Counters
from tollbridge.engine.ports import Runner, Sampled, Sampler
from tollbridge.engine.requests import LiveRequest
from tollbridge.engine.transfers import TransferDesk
from tollbridge.errors import TransferError
from tollbridge.kv.pool import BlockPool
from tollbridge.sched.plan import StepPlan
from tollbridge.sched.scheduler import Schedule, Scheduler
from tollbridge.wire.events import KVEvent

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReleaseSend:
    """Cancel the send of this transfer: nobody will fetch it."""

    transfer_id: str


Command = LiveRequest | ReleaseSend | str  # a new request, a send to give up, or the id of a request to abort
Delivery = tuple[Sink, StepOutput]


class EngineLoop:
    """Live requests with the scheduler, the transfers and the model that serve them."""

    def __init__(
        self,
        *,
        info: ModelInfo,
        config: EngineConfig,
        runner: Runner,
        sampler: Sampler,
        desk: TransferDesk,
        clock: Clock,
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._desk = desk
        self._clock = clock
        self._lock = threading.Lock()
        self._pool = BlockPool(info.num_blocks, info.block_size)
        self._scheduler = Scheduler(
            self._pool,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=info.max_model_len,
            before_preempt=desk.before_preempt,
        )
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._max_pinned_blocks = int(config.max_pinned_fraction * info.num_blocks)
        self._live: dict[str, LiveRequest] = {}  # by request id, until the last output
        self._outbox: list[Delivery] = []  # of the step in progress
        self._counters = Counters()
        self.is_idle = True

    def check_fits(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raise ContextLengthError when such a request can never run (any thread)."""
        self._scheduler.check_fits(num_prompt_tokens, max_tokens)

    def step(self, commands: Iterable[Command]) -> list[Delivery]:
        """Obey the commands, take the ends of transfers, run one step; return the outputs for the sinks.

        Afterwards `is_idle` says whether there is nothing to do before a command comes or a transfer ends.
        """
        with self._lock:
            self._obey(commands)
            now_s = self._clock.monotonic()
            self._desk.poll(self._scheduler, now_s)
            schedule = self._scheduler.schedule()
            self._placed(schedule, now_s)
        self.is_idle = schedule.is_idle
        if schedule.plan is not None:
            self._compute(schedule.plan)
        return self._take_outbox()

    def abort_all(self, commands: Iterable[Command]) -> list[Delivery]:
        """Obey the last commands, then abort every request."""
        with self._lock:
            self._obey([*commands])
            self._obey(list(self._live))
        return self._take_outbox()

    def abandon(self, commands: Iterable[Command], error: str) -> list[Delivery]:
        """End every request with `error` and trust nothing else: the loop itself has failed."""
        lost = [*self._live.values(), *(command for command in commands if isinstance(command, LiveRequest))]
        self._live.clear()
        return [*self._take_outbox(), *((live.request.sink, live.end("error", error)) for live in lost)]

    def close(self) -> None:
        """Close sender and receiver, and take the ends of their transfers."""
        self._desk.close()
        with self._lock:
            self._desk.poll(self._scheduler, self._clock.monotonic())

    def take_events(self) -> list[KVEvent]:
        """Return the KV cache events since the last call (any thread)."""
        with self._lock:
            return self._pool.take_events()

    def statistics(self, queued: Sequence[LiveRequest] = ()) -> EngineStatistics:
        """Return gauges and counters (any thread); `queued` are requests that `step` has not been told of yet."""
        with self._lock:
            scheduler = self._scheduler.statistics()
            counters = self._counters
            return EngineStatistics(
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting + len(queued),
                num_parked=scheduler.num_parked,
                num_blocks=self._pool.num_blocks,
                num_free_blocks=self._pool.num_free,
                num_pinned_blocks=scheduler.num_pinned_blocks,
                max_pinned_blocks=self._max_pinned_blocks,
                waiting_prefill_tokens=scheduler.waiting_prefill_tokens
                + sum(live.sequence.num_prefill_tokens for live in queued),
                max_num_batched_tokens=self._max_num_batched_tokens,
                steps_total=counters.steps,
                prompt_tokens_total=counters.prompt,
                generation_tokens_total=counters.generated,
                prompt_tokens_by_source=counters.by_source(),
                prefix_cache_queries_total=counters.cache_queries,
                prefix_cache_hits_total=counters.cache_hits,
                preemptions_total=scheduler.preemptions_total,
                kv_recomputed_tokens_total=self._desk.recomputed_tokens_total,
            )

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken (any thread)."""
        with self._lock:
            self._scheduler.check()
            self._desk.check()
            for live in self._live.values():
                live.check()

    def _obey(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, LiveRequest):
                self._begin(command)
            elif isinstance(command, ReleaseSend):
                self._desk.release(command.transfer_id)
            elif (live := self._live.get(command)) is not None:
                self._end(live, live.end("abort"), complete=False, detail="The request was aborted.")

    def _begin(self, live: LiveRequest) -> None:
        self._live[live.request.request_id] = live
        self._scheduler.add(live.sequence)
        try:
            self._desk.begin(live)
        except TransferError as error:  # the sender does not take it: this request ends, the loop goes on
            self._end(live, live.end("error", error.message), complete=False, detail=error.message)

    def _placed(self, schedule: Schedule, now_s: float) -> None:
        """Tell the transfers which sequences got their blocks, and which must give them back."""
        for sequences, can_compute in ((schedule.admitted, True), (schedule.parked, False)):
            for sequence in sequences:
                live = self._live[sequence.request_id]
                if live.scheduled_s is None:
                    live.got_blocks(now_s)
                    self._counters.admitted(live)
                if can_compute:
                    live.can_compute(now_s)
                    self._desk.admitted(live)
                else:
                    self._desk.parked(live)
        if schedule.revoked is not None:
            self._desk.revoked(self._live[schedule.revoked.request_id])
        if schedule.starved:
            self._desk.shed(self._scheduler.num_pinned_blocks - 1)

    def _compute(self, plan: StepPlan) -> None:
        """Run the model on a plan and give every sequence its token. This is the boundary to the model's errors."""
        self._counters.steps += 1
        drawing = [self._live[chunk.request_id] for chunk in plan.chunks if chunk.needs_logits]
        try:
            logits = self._runner.run(plan, self._desk.layer_hook(plan))
            self._score(logits, plan)
            sampled = self._sample(logits, plan, drawing) if drawing else Sampled([])
        except Exception:  # whatever the model raises ends this plan's requests, and no others
            logger.exception("A step over %d requests failed", len(plan.chunks))
            with self._lock:
                self._fail(plan)
            return
        with self._lock:
            self._desk.computed(plan)
            self._scheduler.commit(plan, sampled.token_ids)
            self._postprocess(drawing, sampled)

    def _score(self, logits: object, plan: StepPlan) -> None:
        """Give the requests that want it the log probabilities of the prompt tokens behind those of this plan."""
        first_row = 0
        for chunk in plan.chunks:
            if chunk.all_logits:
                live = self._live[chunk.request_id]
                first, prompt = chunk.first_token + 1, live.request.prompt_token_ids
                behind = prompt[first : first + len(chunk.token_ids)]
                live.score(first, self._sampler.score(logits, first_row, behind, live.sampling.prompt_logprobs or 0))
            first_row += chunk.num_rows

    def _sample(self, logits: object, plan: StepPlan, drawing: list[LiveRequest]) -> Sampled:
        draws, rows = [live.draw for live in drawing], None
        if plan.num_rows != len(draws):
            ends = itertools.accumulate(chunk.num_rows for chunk in plan.chunks)
            rows = [end - 1 for chunk, end in zip(plan.chunks, ends, strict=True) if chunk.needs_logits]
        sampled = self._sampler.sample(logits, draws, rows)
        if len(sampled.token_ids) != len(draws):
            raise RuntimeError(f"the sampler returned {len(sampled.token_ids)} tokens for {len(draws)} rows of logits")
        return sampled

    def _postprocess(self, drawing: list[LiveRequest], sampled: Sampled) -> None:
        """Turn sampled tokens into outputs and end what is finished."""
        now_s = self._clock.monotonic()
        self._counters.generated += len(drawing)
        for index, (live, token) in enumerate(zip(drawing, sampled.token_ids, strict=True)):
            if live.first_token_s is None:
                live.first_token_s = now_s
                self._counters.prefilled(live)
            try:
                error = sampled.errors.get(index)
                output = live.end("error", error) if error else live.take(token, sampled.logprobs.get(index))
            except Exception:  # a token that the vocabulary cannot turn into text ends its own request only
                logger.exception("The text of request %s failed", live.request.request_id)
                output = live.end("error", f"Token {token} could not be turned into text; see the worker's log.")
            if output.finish_reason is None:
                self._outbox.append((live.request.sink, output))
            else:
                self._end(live, output, complete=output.finish_reason != "error", detail=output.error)

    def _fail(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            live = self._live[chunk.request_id]
            output = live.end("error", "The model failed while it computed this request; see the worker's log.")
            self._end(live, output, complete=False, detail=output.error)

    def _end(self, live: LiveRequest, output: StepOutput, *, complete: bool, detail: str = "") -> None:
        pin = self._desk.ending(live, complete=complete, detail=detail)
        self._scheduler.finish(live.sequence, pin=pin)
        if pin and self._scheduler.num_pinned_blocks > self._max_pinned_blocks:
            self._desk.shed(self._max_pinned_blocks, unsent_too=True)
        del self._live[live.request.request_id]
        self._outbox.append((live.request.sink, output))

    def _take_outbox(self) -> list[Delivery]:
        outbox, self._outbox = self._outbox, []
        return outbox
