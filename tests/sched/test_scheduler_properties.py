"""Random traffic on a small cache: invariants after every call, and everything ends."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.sched.build import BLOCK_SIZE, make_sequence
from tollbridge.kv.pool import BlockPool
from tollbridge.sched.scheduler import Scheduler
from tollbridge.sched.sequence import State, TokenSequence

NUM_BLOCKS, BUDGET, MAX_SEQS = 10, 12, 3


class Traffic(RuleBasedStateMachine):
    """Prompts over a tiny alphabet hit each other's prefixes. A step computes; outside, transfers end."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.scheduler = Scheduler(self.pool, max_num_batched_tokens=BUDGET, max_num_seqs=MAX_SEQS, max_model_len=100)
        self.limits: dict[TokenSequence, int] = {}  # live ones, and how many tokens they want in all
        self.pinned: list[TokenSequence] = []
        self.count = 0
        self.is_idle = False
        self.memory: dict[int, list[int]] = {}  # block -> tokens whose KV it holds

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        max_tokens=st.integers(1, 16),
        role=st.sampled_from(["local", "remote", "awaited"]),
        priority=st.integers(-1, 1),
        scores_prompt=st.booleans(),
    )
    def add(self, prompt: list[int], max_tokens: int, role: str, priority: int, scores_prompt: bool) -> None:
        self.count += 1
        self.scheduler.check_fits(len(prompt), max_tokens)
        sequence = make_sequence(
            f"s{self.count}", prompt, remote=role == "remote", awaited=role == "awaited", priority=priority
        )
        sequence.scores_prompt = scores_prompt and role == "local"
        self.scheduler.add(sequence)
        self.limits[sequence] = len(prompt) + max_tokens

    @rule()
    def step(self) -> None:
        schedule = self.scheduler.schedule()
        self.scheduler.check()
        self.is_idle = schedule.is_idle and schedule.revoked is None
        if schedule.revoked is not None:
            self.scheduler.loaded(schedule.revoked, accepted=False)
        if schedule.plan is None:
            return
        assert 0 < schedule.plan.num_tokens <= BUDGET
        assert len(schedule.plan.chunks) <= MAX_SEQS
        by_name = {sequence.request_id: sequence for sequence in self.limits}
        for chunk in schedule.plan.chunks:
            sequence = by_name[chunk.request_id]
            assert list(chunk.token_ids) == sequence.token_ids[chunk.first_token :][: len(chunk.token_ids)]
            self._expect(sequence, chunk.first_token)
            self._write(sequence, chunk.first_token, chunk.first_token + len(chunk.token_ids))
        num_rows = sum(chunk.needs_logits for chunk in schedule.plan.chunks)
        for sequence in self.scheduler.commit(schedule.plan, [self.count % 2] * num_rows):
            if sequence.num_tokens == self.limits[sequence]:
                del self.limits[sequence]
                self._finish(sequence, pin=self.count % 3 == 0)

    @precondition(lambda self: self._parked())
    @rule(accepted=st.booleans(), data=st.data())
    def load_ends(self, accepted: bool, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self._parked()))
        if accepted:
            self._write(sequence, sequence.num_hit_tokens, sequence.num_prompt_tokens - 1)
        self.scheduler.loaded(sequence, accepted=accepted)

    @precondition(lambda self: self.limits)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(list(self.limits)))
        del self.limits[sequence]
        self._finish(sequence, pin=sequence.state is State.PARKED)

    @precondition(lambda self: self.pinned)
    @rule()
    def transfer_ends(self) -> None:
        self.scheduler.unpin(self.pinned.pop(0))

    @invariant()
    def holds(self) -> None:
        self.scheduler.check()
        for sequence in self.limits:
            self._expect(sequence, sequence.num_computed)

    def teardown(self) -> None:
        """Everything ends when transfers do: nobody starves, nothing leaks."""
        while self.limits or self.pinned:
            self.step()
            if not self.is_idle:
                continue
            assert self.pinned or self._parked(), "a request waits for nothing"
            assert self.pinned or not any(s.awaited for s in self.limits), (
                "another worker may wait for this one for ever"
            )
            while self.pinned:
                self.transfer_ends()
            for sequence in self._parked():
                self.scheduler.loaded(sequence, accepted=False)
        self.scheduler.check()
        assert self.pool.num_free == NUM_BLOCKS

    def _parked(self) -> list[TokenSequence]:
        return [sequence for sequence in self.limits if sequence.state is State.PARKED]

    def _finish(self, sequence: TokenSequence, *, pin: bool) -> None:
        self.scheduler.finish(sequence, pin=pin)
        if sequence.state is State.PINNED:
            self.pinned.append(sequence)

    def _write(self, sequence: TokenSequence, first: int, last: int) -> None:
        """Put KV into memory: what a block holds is named by the whole prefix up to each token."""
        for position in range(first, last):
            block = self.memory.setdefault(sequence.block_table[position // BLOCK_SIZE], [0] * BLOCK_SIZE)
            block[position % BLOCK_SIZE] = hash(tuple(sequence.token_ids[: position + 1]))

    def _expect(self, sequence: TokenSequence, num_tokens: int) -> None:
        """What counts as computed is in the sequence's blocks."""
        for position in range(num_tokens):
            block = self.memory[sequence.block_table[position // BLOCK_SIZE]]
            assert block[position % BLOCK_SIZE] == hash(tuple(sequence.token_ids[: position + 1]))


Traffic.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestTraffic = Traffic.TestCase
