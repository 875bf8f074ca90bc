"""The KV of one split on its way: what prefill has computed, what decode asked for, and the flow between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tollbridge.sim.agenda import Agenda
from tollbridge.sim.network import Flow, Network

Published = tuple[float, float]  # (computed at, leading tokens whose KV is there then; a layer counts as its share)


class Transfer:
    """Ends exactly once: `on_end(accepted)`. Prefill publishes before or after decode opens it."""

    def __init__(
        self,
        agenda: Agenda,
        network: Network,
        path: tuple[str, ...],
        *,
        line: object,
        bytes_per_token: float,
        latency_s: float,
        on_end: Callable[[bool], None],
    ) -> None:
        self._agenda = agenda
        self._network = network
        self._path = path
        self._line = line  # what the transfers of one pair of workers have in common
        self._bytes_per_token = bytes_per_token
        self._latency_s = latency_s
        self._on_end = on_end
        self._published: list[Published] = []
        self._first = self._last = 0
        self._supplied = 0.0  # bytes that the flow knows of
        self.flow: Flow | None = None
        self.opened_s: float | None = None
        self.ended_s: float | None = None

    @property
    def num_tokens(self) -> int:
        return self._last - self._first

    @property
    def num_bytes(self) -> float:
        return self._bytes_per_token * self.num_tokens

    @property
    def bytes_to_go(self) -> float:
        return self._network.remaining(self.flow) if self.flow is not None else 0.0

    @property
    def bytes_per_s(self) -> float:
        """What it moves now."""
        return self._network.rate(self.flow) if self.flow is not None and self.ended_s is None else 0.0

    @property
    def capacity_bytes_per_s(self) -> float:
        """What it would move alone."""
        return self._network.capacity(self._path)

    @property
    def waiting_bytes(self) -> float:
        """What has been computed and not been sent."""
        if self.flow is None or self.ended_s is not None:
            return 0.0
        self._network.remaining(self.flow)
        return self.flow.backlog

    def publish(self, pieces: Iterable[Published]) -> None:
        """The KV of so many leading tokens is there at these times, in order."""
        if self.ended_s is not None:
            return
        pieces = list(pieces)
        self._published += pieces
        if self.flow is not None:
            self._supply(pieces)

    def rewind(self) -> None:
        """Prefill was preempted: what has not been sent is to be computed again."""
        self._published = []
        if self.flow is not None and self.ended_s is None:
            self._supplied = self._network.withdraw(self.flow)

    def open(self, first: int, last: int) -> None:
        """Decode asks for the tokens [first, last)."""
        self._first, self._last = first, last
        self.opened_s = self._agenda.now_s
        if self.ended_s is not None:
            self._on_end(False)
            return
        self.flow = self._network.open(self._path, self.num_bytes, lambda: self._end(True), line=self._line)
        self._supply(self._published)

    def end(self) -> None:
        """Nobody needs it any more, or one side is gone. Idempotent."""
        if self.ended_s is None:
            if self.flow is not None:
                self._network.close(self.flow)
            self._end(False)

    def _end(self, accepted: bool) -> None:
        self.ended_s = self._agenda.now_s
        self._on_end(accepted)

    def _supply(self, published: Iterable[Published]) -> None:
        assert self.flow is not None and self.opened_s is not None
        earliest_s = self.opened_s + self._latency_s
        pieces = []
        for time_s, tokens in published:
            num_bytes = self._bytes_per_token * min(max(tokens - self._first, 0.0), self.num_tokens)
            if num_bytes > self._supplied:
                self._supplied = num_bytes
                pieces.append((max(time_s, earliest_s), num_bytes))
        if pieces:
            self._network.supply(self.flow, pieces)
