"""Which worker served a session last, and how much of it that one computed. Bounded; hints, never truth.

The index knows the prompts that were sent to a worker; what the worker generated it knows only from KV events. So for a
worker without them the next turn of a conversation looks as if the last answer had to be computed: a session fills that
gap. Of unrelated prompts under one name (`user` is a person, not a conversation) it says nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

MAX_SESSIONS = 1 << 14


class Seat(NamedTuple):
    """The last turn of a session."""

    worker: str  # that decoded it
    prompt_tokens: int
    num_tokens: int  # the answer's included
    at_s: float

    def cached(self, found: int, num_tokens: int, block_size: int) -> int:
        """Return the cached tokens of the next prompt, of `num_tokens`, of which `found` are known to be.

        If those are all of the last prompt that can be, the next one probably goes on from the last answer.
        """
        before = (self.prompt_tokens - 1) // block_size * block_size
        if not 0 < before <= found:
            return found
        return max(found, (min(self.num_tokens, num_tokens) - 1) // block_size * block_size)


class Sessions:
    """Seats by the name of the session, the least recent first. `lasts_s`: then it is forgotten."""

    def __init__(self, *, lasts_s: float, max_sessions: int = MAX_SESSIONS) -> None:
        self._lasts_s = lasts_s
        self._max_sessions = max_sessions
        self._seats: OrderedDict[str, Seat] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seats)

    def find(self, session: str | None, now_s: float) -> Seat | None:
        """Return where the session was last, None when it is new or has been away for too long."""
        seat = self._seats.get(session) if session is not None else None
        return seat if seat is not None and now_s - seat.at_s < self._lasts_s else None

    def served(self, session: str, worker: str, *, prompt_tokens: int, completion_tokens: int, now_s: float) -> None:
        """A turn of the session has ended on `worker`."""
        self._seats[session] = Seat(worker, prompt_tokens, prompt_tokens + completion_tokens, now_s)
        self._seats.move_to_end(session)
        while len(self._seats) > self._max_sessions:
            self._seats.popitem(last=False)
