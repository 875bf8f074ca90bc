"""The workers of a list, and of a file that is read again whenever it changes.

The file is a cluster file of which only `workers` counts. It is looked at every second; what changed is read once it
has stood still for one more look, so that a file being written is left alone. One that cannot be read, or that holds
a mistake, changes nothing: the last good list stands, and the log, /fleet and the metrics say why.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from tollbridge.clock import Clock
from tollbridge.config.address import parse_address
from tollbridge.config.cluster import WorkerConfig
from tollbridge.config.load import load
from tollbridge.discovery.base import DiscoveryStatistics, Endpoint, Sight, Tell
from tollbridge.errors import ConfigError

log = logging.getLogger("tollbridge.discovery")

POLL_S = 1.0

Stamp = tuple[int, int, int]  # (inode, mtime in ns, bytes): another file, or another content


class StaticDiscovery:
    """The workers of the cluster file."""

    def __init__(self, workers: Sequence[WorkerConfig], clock: Clock) -> None:
        self._workers = workers
        self._clock = clock
        self._sight = Sight("static", "the cluster file")

    async def run(self, tell: Tell) -> None:
        tell([Endpoint(worker=worker) for worker in self._workers])
        self._sight.looked(len(self._workers), self._clock.monotonic())
        await asyncio.Event().wait()

    def statistics(self) -> DiscoveryStatistics:
        return self._sight.statistics(self._clock.monotonic())


class FileDiscovery:
    """The workers of the file at `path`, read anew whenever it changes."""

    def __init__(self, path: Path, clock: Clock, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._path = path
        self._clock = clock
        self._sleep = sleep
        self._sight = Sight("static", str(path))
        self._read: Stamp | None = None  # of what was read last, good or bad
        self._seen: Stamp | None = None  # at the last look
        self._num_workers = 0

    async def run(self, tell: Tell) -> None:
        """See `Discovery.run`. ConfigError when the file is wrong at the start: nobody could be served."""
        self._read = self._seen = self._stamp()
        self._tell(tell, read_workers(self._path))
        while True:
            await self._sleep(POLL_S)
            self.look(tell)

    def look(self, tell: Tell) -> None:
        """Read the file if it has changed and stands still."""
        try:
            stamp = self._stamp()
            stands_still, self._seen = stamp == self._seen, stamp
            if stamp != self._read and stands_still:
                self._read = stamp
                self._tell(tell, read_workers(self._path))
            elif self._sight.error is None:
                self._sight.true(self._num_workers, self._clock.monotonic())
        except ConfigError as error:
            if self._sight.failed(error.message):
                log.warning("the last good list of workers stays: %s", error.message)

    def statistics(self) -> DiscoveryStatistics:
        return self._sight.statistics(self._clock.monotonic())

    def _tell(self, tell: Tell, workers: Sequence[WorkerConfig]) -> None:
        tell([Endpoint(worker=worker) for worker in workers])
        self._num_workers = len(workers)
        self._sight.looked(self._num_workers, self._clock.monotonic())
        log.info("workers read: file=%s workers=%d", self._path, len(workers))

    def _stamp(self) -> Stamp:
        """Return what tells one state of the file from another; ConfigError when there is none.

        A mounted ConfigMap is a symbolic link that is turned to another folder: the file behind it counts.
        """
        try:
            found = os.stat(self._path)
        except OSError as error:
            self._read = self._seen = None  # whatever comes back is read
            raise ConfigError(f"{self._path} cannot be read: {error.strerror}.") from None
        return found.st_ino, found.st_mtime_ns, found.st_size


def read_workers(path: Path) -> Sequence[WorkerConfig]:
    """Return the workers of a cluster file; ConfigError when it is wrong or leaves an address open."""
    workers = load(path, environ={}).cluster.workers
    if not workers:
        raise ConfigError(f"{path}: workers is empty: list at least one worker.")
    for index, worker in enumerate(workers):
        if parse_address(worker.url, scheme="http://").port == 0:
            raise ConfigError(f'{path}: workers[{index}].url is "{worker.url}", but needs the real port.')
    return workers
