"""What every discovery tells: the complete set of workers, each time that it changes.

A discovery that cannot see (its API server or name server is away, its file is broken) keeps what it told last and says
so in its statistics: workers that are alive go on serving, and the router's own health checks find those that are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec

from tollbridge.config.cluster import WorkerConfig

Standing = Literal["serving", "not_ready", "draining"]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One worker that somebody runs. Another `uid` under the same name is another worker."""

    worker: WorkerConfig
    uid: str = ""
    standing: Standing = "serving"  # draining: it finishes what it has and gets nothing new

    @property
    def name(self) -> str:
        return self.worker.name


class DiscoveryStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """How well it sees. Counters since start (`*_total`)."""

    kind: str
    where: str  # what it looks at
    complete: bool = False  # it has told once: what it told is all there is
    num_endpoints: int = 0
    num_ignored: int = 0  # what it saw and could not take for a worker
    age_s: float | None = None  # since it last knew that what it told is true; None: it never did
    error: str | None = None  # why it does not see now, one sentence; what it told last stands
    looks_total: int = 0  # complete looks: lists, rounds of names, readings of the file
    failures_total: int = 0


Tell = Callable[[Sequence[Endpoint]], None]


class Discovery(Protocol):
    """Use once."""

    async def run(self, tell: Tell) -> None:
        """Call `tell` with the complete set, first as soon as it is known, then after each change. Never ends.

        Raises ConfigError when it can never work as it is configured.
        """
        ...

    def statistics(self) -> DiscoveryStatistics: ...


class Sight:
    """The statistics of a discovery as it goes along. `now_s` is monotonic."""

    def __init__(self, kind: str, where: str) -> None:
        self._kind, self._where = kind, where
        self._complete = False
        self._num_endpoints = self._num_ignored = 0
        self._seen_s: float | None = None
        self._error: str | None = None
        self._looks = self._failures = 0

    @property
    def error(self) -> str | None:
        return self._error

    def looked(self, num_endpoints: int, now_s: float, *, num_ignored: int = 0) -> None:
        """A complete look succeeded."""
        self._looks += 1
        self._complete = True
        self.true(num_endpoints, now_s, num_ignored=num_ignored)

    def true(self, num_endpoints: int, now_s: float, *, num_ignored: int = 0) -> None:
        """What was told is true now, with `num_endpoints` workers in it."""
        self._num_endpoints, self._num_ignored, self._seen_s, self._error = num_endpoints, num_ignored, now_s, None

    def failed(self, error: str) -> bool:
        """It does not see: return whether that is news."""
        news, self._error = self._error != error, error
        self._failures += 1
        return news

    def statistics(self, now_s: float) -> DiscoveryStatistics:
        return DiscoveryStatistics(
            kind=self._kind,
            where=self._where,
            complete=self._complete,
            num_endpoints=self._num_endpoints,
            num_ignored=self._num_ignored,
            age_s=None if self._seen_s is None else max(now_s - self._seen_s, 0.0),
            error=self._error,
            looks_total=self._looks,
            failures_total=self._failures,
        )
