"""Sequences that wait for admission: two queues, by priority, then arrival, that pass each other, but not for ever.

*Local* sequences need a place in the batch and blocks; *remote* ones need only blocks and are then parked. A head that
cannot be placed closes its own queue and leaves the other open, until it has been passed `MAX_OVERTAKES` times: then it
is the only one that may be placed. So a load that finds no room does not stop the local work behind it, and no queue
starves the other.

Within a queue, the oldest sequence that has been passed `MAX_PASSED` times by later ones of higher priority goes first:
a low priority means late, not never.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator

from tollbridge.sched.sequence import State, TokenSequence

MAX_OVERTAKES = 16
MAX_PASSED = 64


def by_order(sequence: TokenSequence) -> tuple[int, int]:
    return sequence.priority, sequence.order


class WaitingQueues:
    """The local and the remote queue."""

    def __init__(self) -> None:
        self._local: list[TokenSequence] = []
        self._remote: list[TokenSequence] = []

    def __len__(self) -> int:
        return len(self._local) + len(self._remote)

    def __iter__(self) -> Iterator[TokenSequence]:
        yield from self._local
        yield from self._remote

    def push(self, sequence: TokenSequence) -> None:
        """Queue in its place; a preempted sequence so goes back before later ones."""
        sequence.state = State.WAITING
        sequence.num_overtakes = 0
        insort(self._queue(sequence), sequence, key=by_order)

    def remove(self, sequence: TokenSequence) -> None:
        self._queue(sequence).remove(sequence)

    def place(self, try_place: Callable[[TokenSequence], bool]) -> None:
        """Offer heads to `try_place`, which says whether it took them, until no head is taken."""
        blocked: list[TokenSequence] = []
        while (head := self._next(blocked)) is not None:
            queue = self._queue(head)
            if try_place(head):
                queue.remove(head)
                _note_passed(queue, head)
                for passed in blocked:
                    passed.num_overtakes += by_order(passed) < by_order(head)
                continue
            blocked.append(head)
            if head.num_overtakes >= MAX_OVERTAKES:
                return

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        for queue, remote in ((self._local, False), (self._remote, True)):
            assert queue == sorted(queue, key=by_order), "a waiting queue is out of order"
            assert all(sequence.remote is remote for sequence in queue), "a sequence waits in the wrong queue"
            assert all(sequence.state is State.WAITING for sequence in queue), "a sequence that waits says otherwise"
            assert not any(s.block_table or s.num_computed for s in queue), "a sequence waits and holds blocks"

    def _next(self, blocked: list[TokenSequence]) -> TokenSequence | None:
        """Return the head to try next: one that was passed too often, else the older one."""
        heads = [_head(queue) for queue in (self._local, self._remote) if queue]
        open_heads = [head for head in heads if head not in blocked]
        return min(open_heads, key=lambda head: (head.num_overtakes < MAX_OVERTAKES, by_order(head)), default=None)

    def _queue(self, sequence: TokenSequence) -> list[TokenSequence]:
        return self._remote if sequence.remote else self._local


def _head(queue: list[TokenSequence]) -> TokenSequence:
    """Return who is next: the first, unless the oldest has been passed too often."""
    if queue[0].priority == queue[-1].priority:
        return queue[0]
    oldest = _oldest(queue)
    return oldest if oldest.num_passed >= MAX_PASSED else queue[0]


def _note_passed(queue: list[TokenSequence], placed: TokenSequence) -> None:
    """Count it when `placed`, which has just left `queue`, was younger than its oldest."""
    if queue and queue[-1].priority > placed.priority:
        oldest = _oldest(queue)
        oldest.num_passed += oldest.order < placed.order


def _oldest(queue: list[TokenSequence]) -> TokenSequence:
    return min(queue, key=lambda sequence: sequence.order)
