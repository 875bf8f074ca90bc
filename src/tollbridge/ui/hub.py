"""One picture for all who look: built twice a second while anybody does, never otherwise.

A viewer has room for one picture. One that reads too slowly misses some, and since each is whole it loses nothing;
so neither slow viewers nor many requests can make memory grow or the router work more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

log = logging.getLogger("tollbridge.ui")


@dataclass(frozen=True, kw_only=True)
class HubStatistics:
    num_viewers: int
    built_total: int
    missed_total: int


class Viewer:
    """Room for the newest picture. Belongs to one consumer."""

    def __init__(self) -> None:
        self._newest: bytes | None = None
        self._changed = asyncio.Event()
        self._closed = False

    def show(self, picture: bytes) -> bool:
        """Put `picture` in place; return whether one that nobody had taken was there."""
        missed, self._newest = self._newest is not None, picture
        self._changed.set()
        return missed

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    async def pictures(self) -> AsyncIterator[bytes]:
        """Yield pictures as they come, until closed."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._closed:
                return
            picture, self._newest = self._newest, None
            if picture is not None:
                yield picture


class Hub:
    """Builds with `build` every `interval_s` while there are viewers. `run` never ends; cancel it."""

    def __init__(
        self,
        build: Callable[[], bytes],
        *,
        interval_s: float = 0.5,
        max_viewers: int = 32,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._build, self._interval_s, self._max_viewers, self._sleep = build, interval_s, max_viewers, sleep
        self._viewers: set[Viewer] = set()
        self._wanted = asyncio.Event()
        self._closed = False
        self._built_total = 0
        self._missed_total = 0

    @property
    def is_full(self) -> bool:
        return self._closed or len(self._viewers) >= self._max_viewers

    @contextmanager
    def viewer(self) -> Iterator[Viewer]:
        """Yield a viewer that is told while the context lasts. Check `is_full` first."""
        assert not self.is_full
        viewer = Viewer()
        self._viewers.add(viewer)
        self._wanted.set()
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)

    async def run(self) -> None:
        while True:
            await self._wanted.wait()
            while self._viewers:
                self._tell()
                await self._sleep(self._interval_s)
            self._wanted.clear()

    def close(self) -> None:
        """Let every viewer go, and take no more."""
        self._closed = True
        for viewer in self._viewers:
            viewer.close()

    def statistics(self) -> HubStatistics:
        return HubStatistics(
            num_viewers=len(self._viewers), built_total=self._built_total, missed_total=self._missed_total
        )

    def _tell(self) -> None:
        try:
            picture = self._build()
        except Exception:  # a task boundary: one picture that cannot be drawn must not end the others
            log.exception("the dashboard's picture could not be built")
            return
        self._built_total += 1
        self._missed_total += sum(viewer.show(picture) for viewer in self._viewers)
