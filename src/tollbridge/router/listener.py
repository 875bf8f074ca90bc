"""The KV events of one publisher, in order and without gaps, however the network behaves.

Batches are numbered from 0 in each life of the publisher. PUB drops what a slow or absent listener does not take, so a
number that is not the next one means that something was missed: the replay socket is asked for it. What it no longer
has is lost, and with it the ability to follow: `lost` is called, and the reader must forget what it knows.

    first contact   replay from 0: what the publisher still has of its past
    the next number apply
    a later number  replay from the one that is missing
    an earlier one  of a batch that is older than the last: seen before, drop. Newer: another life, begin again
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import zmq
import zmq.asyncio

from tollbridge.router.sources import Source
from tollbridge.wire.events import Decoded, decode

log = logging.getLogger("tollbridge.router")

HIGH_WATER_MARK = 10_000  # batches held for us by either side; beyond it the publisher drops, and we see a gap
REPLAY_TIMEOUT_S = 5.0  # without a frame
POLL_S = 0.5
_END = (-1).to_bytes(8, "big", signed=True)


@dataclass
class ListenerStatistics:
    """Counters since start."""

    batches_total: int = 0
    events_total: int = 0
    gaps_total: int = 0  # numbers that were skipped, whatever became of them
    replays_total: int = 0
    lost_total: int = 0  # times that a gap could not be closed
    restarts_total: int = 0
    unreadable_total: int = 0  # batches, and events in them, that could not be read


@dataclass(kw_only=True)
class Listener:
    """Follows one publisher. `apply` takes a batch, `lost` says that what is known is no longer true.

    `run` returns when `is_current` does not hold any more; cancelling it is fine at any time.
    """

    source: Source
    context: zmq.asyncio.Context
    apply: Callable[[Decoded], object]
    lost: Callable[[], object]
    is_current: Callable[[], bool]
    statistics: ListenerStatistics = field(default_factory=ListenerStatistics)
    is_following: bool = False  # what could be learnt of the past has been
    next_number: int = 0
    last_ts: float = float("-inf")

    async def run(self) -> None:
        with self._socket(zmq.SUB, self.source.events) as events:
            events.setsockopt(zmq.SUBSCRIBE, b"")
            await self._catch_up()
            self.is_following = True
            while self.is_current():
                if not await events.poll(int(POLL_S * 1000)):
                    continue
                frames = await events.recv_multipart()
                if len(frames) != 3 or len(frames[1]) != 8:
                    self.statistics.unreadable_total += 1
                    continue
                await self._take(int.from_bytes(frames[1], "big"), frames[2])
                await asyncio.sleep(0)  # a publisher in full flow must not keep the requests waiting

    async def _take(self, number: int, payload: bytes) -> None:
        batch = self._read(payload)
        if number < self.next_number:
            if batch is None or batch.ts <= self.last_ts:
                return
            self.statistics.restarts_total += 1
            self._begin_again()
        if number > self.next_number:
            self.statistics.gaps_total += 1
            await self._catch_up()
            if number > self.next_number:
                self._give_up_until(number)
        if number == self.next_number:
            self._apply(number, batch)

    async def _catch_up(self) -> None:
        """Replay what is missing, if the publisher can; a gap at the front of it is for good."""
        if self.source.replay is None:
            return
        self.statistics.replays_total += 1
        try:
            async for number, payload in self._replay(self.next_number):
                if number < self.next_number:
                    continue
                if number > self.next_number:
                    self._give_up_until(number)
                self._apply(number, self._read(payload))
        except TimeoutError:
            log.warning("no replay of KV events: endpoint=%s next=%d", self.source.replay, self.next_number)

    async def _replay(self, first: int) -> AsyncIterator[tuple[int, bytes]]:
        """Yield the batches that the publisher still has from `first` on; TimeoutError when it falls silent."""
        assert self.source.replay is not None
        with self._socket(zmq.DEALER, self.source.replay) as asker:
            await asker.send_multipart([b"", first.to_bytes(8, "big")])
            while True:
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    frames = await asker.recv_multipart()
                if len(frames) != 4 or frames[2] == _END:
                    return
                yield int.from_bytes(frames[2], "big"), frames[3]
                await asyncio.sleep(0)

    def _apply(self, number: int, batch: Decoded | None) -> None:
        self.next_number = number + 1
        if batch is None:
            self.statistics.unreadable_total += 1
            self.lost()
            return
        self.last_ts = max(self.last_ts, batch.ts)
        self.statistics.batches_total += 1
        self.statistics.events_total += len(batch.events)
        self.statistics.unreadable_total += batch.num_unknown
        self.apply(batch)

    def _give_up_until(self, number: int) -> None:
        """What is between the next number and `number` will never come. At first contact nothing is known anyway."""
        if self.next_number:
            self.statistics.lost_total += 1
            self.lost()
        self.next_number = number

    def _begin_again(self) -> None:
        self.lost()
        self.next_number, self.last_ts = 0, float("-inf")

    @staticmethod
    def _read(payload: bytes) -> Decoded | None:
        try:
            return decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    @contextlib.contextmanager
    def _socket(self, kind: int, endpoint: str) -> Iterator[zmq.asyncio.Socket]:
        socket = self.context.socket(kind)
        try:
            socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, int("[" in endpoint))
            socket.connect(endpoint)
            yield socket
        finally:
            socket.close(linger=0)
