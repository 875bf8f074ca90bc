"""Continuous batching: who computes what in the next step, and in which blocks.

A step serves running decodes first (one token each), then prefill chunks, under a token budget; then it admits. Who has
the higher priority comes first, then who is older. Admission takes the prefix-cache hit and allocates blocks for every
token known so far, so a prefill never runs out of blocks half way; only a decode that crosses into a new block can, and
then the last of the running sequences is preempted: its blocks go, its tokens stay and are recomputed as if they were
prompt. Draws depend on (seed, position) only, so preemption does not change the output.

Who waits for whom. A remote sequence, whose KV comes over the wire, is parked: it holds the blocks of its whole prompt,
computes nothing and cannot be preempted. What cannot be admitted is passed a bounded number of times (`waiting.py`);
then nothing else is admitted, what runs drains, and it fits. `check_fits` refuses what an empty cache could not hold.
What runs ends by itself; what is pinned ends when its peer reads, or by the transfer's deadlines. What is parked waits
for a prefill on another worker, which says "queued" for as long as it is, so no deadline ends this wait: two workers
could each park a load and need the blocks under it for the prefill that the other one waits for. Hence a rule: nobody
is kept waiting by a worker that only waits. When nothing runs and an awaited prefill has no room, the youngest load is
*revoked*: cancelled, its blocks given back, and computed here in its turn. Every such cycle contains such a worker; one
that serves a single role never revokes. The same rule holds for what is pinned and not fetched: decode may have no room
to ask for it. When nothing runs and nothing is parked, and still somebody waits for room, the worker is *starved*: the
newest send that decode has not opened is given up. ARCHITECTURE.md has the whole argument.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tollbridge.errors import ContextLengthError
from tollbridge.kv.pool import BlockPool
from tollbridge.sched.plan import SequenceChunk, StepPlan
from tollbridge.sched.sequence import State, TokenSequence
from tollbridge.sched.waiting import WaitingQueues, by_order


@dataclass(frozen=True, kw_only=True)
class SchedulerStatistics:
    """Gauges of now, and counters since start (`*_total`)."""

    num_waiting: int
    num_parked: int
    num_running: int
    num_pinned: int
    num_pinned_blocks: int
    waiting_prefill_tokens: int  # tokens that sequences still have to compute before they generate
    preemptions_total: int


@dataclass(kw_only=True)
class Schedule:
    """One call of `schedule`: the step to run, and what changed hands on the way to it."""

    plan: StepPlan | None = None  # None: nothing can be computed now
    admitted: list[TokenSequence] = field(default_factory=list)  # they run; `num_hit_tokens` were cached
    parked: list[TokenSequence] = field(default_factory=list)  # open their loads
    preempted: list[TokenSequence] = field(default_factory=list)
    starved: bool = False  # give up a pinned send that nobody has opened
    revoked: TokenSequence | None = None  # cancel its load; it stays parked until `loaded`

    @property
    def is_idle(self) -> bool:
        """Nothing happened, and nothing will until a request comes, or a transfer ends."""
        return self.plan is None and not (self.admitted or self.parked or self.preempted)


class Scheduler:
    """Sequences between arrival and end, and their blocks.

    Call `schedule`, run the plan, then `commit`; `add`, `finish` and `loaded` only between a commit and the next
    schedule. `before_preempt(sequence)` is called while the sequence still holds its blocks.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        before_preempt: Callable[[TokenSequence], None] = lambda sequence: None,
    ) -> None:
        self._pool = pool
        self._block_size = pool.block_size
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = min(max_num_seqs, max_num_batched_tokens)  # every decode fits into every step
        self._max_model_len = max_model_len
        self._before_preempt = before_preempt

        self._sequences: dict[str, TokenSequence] = {}  # all but pinned and finished ones
        self._waiting = WaitingQueues()
        self._running: list[TokenSequence] = []  # by priority, then by arrival
        self._parked: dict[TokenSequence, None] = {}
        self._revoked: TokenSequence | None = None  # one of the parked
        self._ready: list[TokenSequence] = []
        self._pinned: dict[TokenSequence, None] = {}
        self._next_order = 0
        self._preemptions_total = 0

    def check_fits(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raise ContextLengthError when such a request can never run. Reads constants only: any thread may call it."""
        total = num_prompt_tokens + max_tokens
        if total > self._max_model_len:
            raise ContextLengthError(
                f"The prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}, {total} together, but this "
                f"worker's context is {self._max_model_len} tokens: shorten the prompt or lower max_tokens."
            )
        capacity = self._pool.num_blocks * self._block_size
        if total - 1 > capacity:  # the last token's KV is never computed
            raise ContextLengthError(
                f"The prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}, but this worker's KV cache "
                f"holds {capacity} tokens: shorten the prompt, lower max_tokens or raise kv_cache_mib."
            )

    def add(self, sequence: TokenSequence) -> None:
        """Queue a new sequence whose `check_fits` passed."""
        sequence.order = self._next_order
        self._next_order += 1
        self._sequences[sequence.request_id] = sequence
        self._waiting.push(sequence)

    def schedule(self) -> Schedule:
        """Decide the next step. A parked sequence in the result waits for `loaded`."""
        schedule = Schedule()
        self._promote_ready()
        chunks = self._decodes(schedule)
        budget = self._prefills(chunks, self._max_num_batched_tokens - len(chunks))
        if not schedule.preempted:
            self._admit(schedule, chunks, budget)
        if chunks:
            schedule.plan = StepPlan(chunks=chunks)
        elif schedule.is_idle:
            schedule.revoked = self._revoke()
            schedule.starved = bool(self._pinned and self._waiting and not (self._parked or self._running))
        return schedule

    def commit(self, plan: StepPlan, sampled: Sequence[int]) -> list[TokenSequence]:
        """Record that the plan was computed, and append one sampled token per chunk that needed logits.

        Returns the sequences that got a token, in plan order.
        """
        grown = []
        tokens = iter(sampled)
        for chunk in plan.chunks:
            sequence = self._sequences[chunk.request_id]
            self._computed(sequence, chunk.first_token + len(chunk.token_ids))
            if chunk.needs_logits:
                sequence.token_ids.append(next(tokens))
                grown.append(sequence)
        return grown

    def loaded(self, sequence: TokenSequence, *, accepted: bool) -> None:
        """Unpark: its KV has come, or (`accepted` False) it has not and is to be recomputed here."""
        revoked = sequence is self._revoked
        self._leave(sequence)
        if accepted:
            self._computed(sequence, sequence.num_prompt_tokens - 1)
        elif revoked:
            self._release(sequence)
            self._waiting.push(sequence)
            return
        sequence.state = State.READY
        self._ready.append(sequence)

    def finish(self, sequence: TokenSequence, *, pin: bool = False) -> None:
        """End a sequence; `pin` keeps the blocks of its prompt until `unpin`."""
        self._leave(sequence)
        del self._sequences[sequence.request_id]
        if not (pin and sequence.block_table):
            sequence.state = State.FINISHED
            self._release(sequence)
            return
        sequence.state = State.PINNED
        self._pinned[sequence] = None
        num_blocks = self._blocks_for(sequence.num_prompt_tokens)
        beyond = sequence.block_table[num_blocks:]
        sequence.block_table = sequence.block_table[:num_blocks]
        self._pool.release(beyond)

    def unpin(self, sequence: TokenSequence) -> None:
        """Release the blocks of a pinned sequence: nobody reads or writes them any more."""
        del self._pinned[sequence]
        sequence.state = State.FINISHED
        self._release(sequence)

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks that pinned sequences hold; a shared one counts once."""
        return len({block for sequence in self._pinned for block in sequence.block_table})

    def statistics(self) -> SchedulerStatistics:
        before_running = [*self._waiting, *self._ready, *self._parked]
        return SchedulerStatistics(
            num_waiting=len(self._waiting) + len(self._ready),
            num_parked=len(self._parked),
            num_running=len(self._running),
            num_pinned=len(self._pinned),
            num_pinned_blocks=self.num_pinned_blocks,
            waiting_prefill_tokens=sum(sequence.num_prefill_tokens for sequence in [*before_running, *self._running]),
            preemptions_total=self._preemptions_total,
        )

    def check(self) -> None:
        """Raise AssertionError when an invariant of the scheduler or its pool is broken."""
        places: dict[State, list[TokenSequence]] = {
            State.WAITING: list(self._waiting),
            State.PARKED: list(self._parked),
            State.READY: self._ready,
            State.RUNNING: self._running,
            State.PINNED: list(self._pinned),
        }
        for state, sequences in places.items():
            assert all(sequence.state is state for sequence in sequences), f"a sequence among the {state.value} is not"
        live = [sequence for state, found in places.items() if state is not State.PINNED for sequence in found]
        assert len(live) == len(self._sequences) and set(live) == set(self._sequences.values()), "a sequence is lost"
        assert self._revoked is None or self._revoked in self._parked, "what is revoked is not parked"
        assert self._running == sorted(self._running, key=by_order), "the batch is out of order"
        assert len(self._running) <= self._max_num_seqs, "the batch is too large"
        self._waiting.check()
        for sequence in live:
            if sequence.state is not State.WAITING:
                self._check_sequence(sequence)
        self._pool.check([sequence.block_table for sequence in [*live, *self._pinned]])

    def _check_sequence(self, sequence: TokenSequence) -> None:
        name = sequence.request_id
        assert len(set(sequence.block_table)) == len(sequence.block_table), f"{name} holds a block twice"
        assert len(sequence.block_table) * self._block_size >= sequence.num_tokens - 1, f"{name} lacks blocks"
        assert sequence.num_computed < sequence.num_tokens, f"{name} has nothing left to compute"
        assert sequence.num_committed_blocks == sequence.num_computed // self._block_size, f"{name} is not committed"

    def _promote_ready(self) -> None:
        while self._ready and len(self._running) < self._max_num_seqs:
            self._run(self._ready.pop(0))

    def _decodes(self, schedule: Schedule) -> list[SequenceChunk]:
        chunks: list[SequenceChunk] = []
        index = 0
        while index < len(self._running):
            sequence = self._running[index]
            if sequence.num_computed + 1 == sequence.num_tokens:
                if not self._grow(sequence, schedule):
                    break  # it was the last one and had to give way itself
                chunks.append(sequence.chunk(1))
            index += 1
        return chunks

    def _prefills(self, chunks: list[SequenceChunk], budget: int) -> int:
        for sequence in self._running:
            if not budget:
                break
            if sequence.num_computed + 1 < sequence.num_tokens:
                chunks.append(sequence.chunk(budget))
                budget -= len(chunks[-1].token_ids)
        return budget

    def _admit(self, schedule: Schedule, chunks: list[SequenceChunk], budget: int) -> None:
        def try_place(sequence: TokenSequence) -> bool:
            nonlocal budget
            if sequence.remote:
                placed = self._place_remote(sequence, schedule)
            else:
                placed = budget > 0 and self._place_local(sequence, schedule)
            if placed and budget and sequence.state is State.RUNNING:
                chunks.append(sequence.chunk(budget))
                budget -= len(chunks[-1].token_ids)
            return placed

        self._waiting.place(try_place)

    def _revoke(self) -> TokenSequence | None:
        """Choose a load to give up, when an awaited prefill has no room and nothing here runs that would make some."""
        stuck = self._parked and not self._running and any(sequence.awaited for sequence in self._waiting)
        if not stuck or self._revoked is not None:
            return None
        self._revoked = max(self._parked, key=by_order)
        return self._revoked

    def _place_local(self, sequence: TokenSequence, schedule: Schedule) -> bool:
        if len(self._running) >= self._max_num_seqs or not self._take_blocks(sequence):
            return False
        self._run(sequence)
        schedule.admitted.append(sequence)
        return True

    def _place_remote(self, sequence: TokenSequence, schedule: Schedule) -> bool:
        if not self._take_blocks(sequence):
            return False
        sequence.remote = False
        if sequence.num_lacking > sequence.veto_tokens:
            sequence.state = State.PARKED
            self._parked[sequence] = None
            schedule.parked.append(sequence)
            return True
        schedule.admitted.append(sequence)  # its own prefix cache holds all of it, or nearly: nothing to load
        sequence.state = State.READY
        self._ready.append(sequence)
        self._promote_ready()
        return True

    def _take_blocks(self, sequence: TokenSequence) -> bool:
        """Give a sequence the blocks for all its tokens, prefix hits first; False when there are too few.

        One block for each running sequence is left over, so that an admission does not preempt in the next step.
        """
        tokens, size = sequence.token_ids, self._block_size
        sequence.chain.grow(tokens)
        num_usable = 0 if sequence.scores_prompt else (len(tokens) - 1) // size
        hits = self._pool.lookup(sequence.chain.hashes[:num_usable])
        num_new = self._blocks_for(len(tokens)) - len(hits)
        if self._pool.num_free_without(hits) < num_new + len(self._running):
            return False
        self._pool.acquire(hits)
        sequence.block_table = hits + self._pool.allocate(num_new)
        sequence.num_committed_blocks = len(hits)
        sequence.num_computed = sequence.num_hit_tokens = len(hits) * size
        sequence.num_computed_peak = max(sequence.num_computed_peak, sequence.num_computed)
        return True

    def _grow(self, sequence: TokenSequence, schedule: Schedule) -> bool:
        """Give a decode a block for its next token, preempting from the end; False when it was preempted itself."""
        if len(sequence.block_table) * self._block_size >= sequence.num_tokens:
            return True
        while not self._pool.num_free:
            victim = self._running[-1]
            self._preempt(victim)
            schedule.preempted.append(victim)
            if victim is sequence:
                return False
        sequence.block_table.extend(self._pool.allocate(1))
        return True

    def _preempt(self, sequence: TokenSequence) -> None:
        self._before_preempt(sequence)
        self._leave(sequence)
        self._release(sequence)
        self._waiting.push(sequence)
        self._preemptions_total += 1

    def _computed(self, sequence: TokenSequence, num_tokens: int) -> None:
        """Note that the KV of the first `num_tokens` is in memory; its full blocks enter the prefix cache."""
        sequence.num_computed = num_tokens
        sequence.num_computed_peak = max(sequence.num_computed_peak, num_tokens)
        first, last = sequence.num_committed_blocks, num_tokens // self._block_size
        if first == last:
            return
        sequence.chain.grow(sequence.token_ids)
        self._pool.commit(
            sequence.block_table[first:last],
            sequence.chain.hashes[first:last],
            parent=sequence.chain.parent(first),
            token_ids=sequence.token_ids[first * self._block_size : last * self._block_size],
            cache_salt=sequence.chain.cache_salt,
        )
        sequence.num_committed_blocks = last

    def _run(self, sequence: TokenSequence) -> None:
        sequence.state = State.RUNNING
        insort(self._running, sequence, key=by_order)

    def _leave(self, sequence: TokenSequence) -> None:
        """Take a sequence out of the queue or set that it is in."""
        if sequence.state is State.PARKED:
            del self._parked[sequence]
            self._revoked = None if sequence is self._revoked else self._revoked
        elif sequence.state is State.RUNNING:
            self._running.remove(sequence)
        elif sequence.state is State.READY:
            self._ready.remove(sequence)
        else:
            self._waiting.remove(sequence)

    def _release(self, sequence: TokenSequence) -> None:
        self._pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed = sequence.num_committed_blocks = sequence.num_hit_tokens = 0

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
