"""Many decode steps of a scheduler at once, for whoever knows that nothing will come between them (the simulator).

Between two admissions a batch that only decodes does the same in every step: each sequence takes a token, and a block
when it has filled its last one. What the steps change is applied here in the order in which they would have changed
it, so that a scheduler and its pool are afterwards exactly as if each step had been scheduled and committed.
"""

from __future__ import annotations

from tollbridge.sched.scheduler import Scheduler
from tollbridge.sched.sequence import TokenSequence

TOKEN = 0  # what every step samples
_GROW, _COMMIT = 0, 1


def num_steps_ahead(scheduler: Scheduler, last: int) -> int:
    """Return how many of the next `last` steps are nothing but decodes of those that run now; 0: use `schedule`."""
    running = scheduler._running
    if not running or scheduler._ready or len(scheduler._waiting):
        return 0
    if any(sequence.num_computed + 1 != sequence.num_tokens for sequence in running):
        return 0
    size = scheduler._block_size
    blocks = sum(max(0, -(-(each.num_tokens - 1 + last) // size) - len(each.block_table)) for each in running)
    return last if blocks <= scheduler._pool.num_free else 0


class DecodeRun:
    """`num_steps` steps as `num_steps_ahead` allows them. Nothing else may touch the scheduler before `advance` has
    reached the step that is to be the last."""

    def __init__(self, scheduler: Scheduler, num_steps: int) -> None:
        self._scheduler = scheduler
        self._running = list(scheduler._running)
        self._start = [sequence.num_tokens for sequence in self._running]
        self._num_done = 0
        self._changes = self._changes_of_blocks(num_steps)
        self._next_change = 0

    @property
    def sequences(self) -> list[TokenSequence]:
        return self._running

    def advance(self, num_done: int, *, is_last: bool) -> None:
        """Compute steps up to `num_done` in all; unless that is the last one, the step after it is scheduled too."""
        until = (num_done, _COMMIT) if is_last else (num_done + 1, _GROW)
        while self._next_change < len(self._changes) and self._changes[self._next_change][:2] <= until:
            step, kind, index = self._changes[self._next_change]
            self._next_change += 1
            sequence = self._running[index]
            if kind == _GROW:
                sequence.block_table.extend(self._scheduler._pool.allocate(1))
            else:
                self._fill(index, step - 1)
                self._scheduler._computed(sequence, self._start[index] - 1 + step)
        self._num_done = num_done
        for index in range(len(self._running)):
            self._fill(index, num_done)

    def _fill(self, index: int, num_done: int) -> None:
        """Append the tokens of the first `num_done` steps."""
        sequence, start = self._running[index], self._start[index]
        missing = start + num_done - sequence.num_tokens
        if missing > 0:
            sequence.token_ids.extend([TOKEN] * missing)
        sequence.num_computed = start - 1 + num_done
        sequence.num_computed_peak = max(sequence.num_computed_peak, sequence.num_computed)

    def _changes_of_blocks(self, num_steps: int) -> list[tuple[int, int, int]]:
        """Return (step, grow or commit, index) for each block that a step takes or fills, in order."""
        size = self._scheduler._block_size
        changes = []
        for index, sequence in enumerate(self._running):
            room = len(sequence.block_table) * size
            grow = room - self._start[index] + 2  # the step that computes position `room`
            changes += [(step, _GROW, index) for step in range(max(1, grow), num_steps + 1, size)]
            commit = size - (self._start[index] - 1) % size  # the step after which a block is full
            changes += [(step, _COMMIT, index) for step in range(commit, num_steps + 1, size)]
        changes.sort()
        return changes
