"""Following a publisher over real ZMQ sockets: the embedded worker's own, and a stand-in that misbehaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio

from tollbridge.clock import ManualClock
from tollbridge.router.listener import Listener
from tollbridge.router.sources import Source
from tollbridge.wire.events import BlockRemoved, Decoded, KVEvent
from tollbridge.worker.events import EventPublisher

PATIENCE_S = 60.0


def event(number: int) -> KVEvent:
    return BlockRemoved(block_hashes=[number])


class Rig:
    """One publisher, one listener, and what the listener has heard."""

    def __init__(self, *, buffer_batches: int = 100) -> None:
        self.clock = ManualClock()
        self.buffer_batches = buffer_batches
        self.heard: list[int | str] = []  # numbers, "lost"
        self.current = True
        self.pending: list[KVEvent] = []
        self.publisher = self.make("tcp://127.0.0.1:0")

    def make(self, endpoint: str) -> EventPublisher:
        return EventPublisher(endpoint, self.take, self.clock, buffer_batches=self.buffer_batches)

    def take(self) -> list[KVEvent]:
        events, self.pending = self.pending, []
        return events

    def publish(self, *numbers: int) -> None:
        for number in numbers:
            self.clock.advance(1.0)
            self.pending.append(event(number))
            self.publisher.tick()

    def miss(self, *numbers: int) -> None:
        """Publish without sending: what PUB does for a listener that is too slow."""
        send = self.publisher._publish
        self.publisher._publish = zmq.Context.instance().socket(zmq.PUB)
        try:
            self.publish(*numbers)
        finally:
            self.publisher._publish.close(linger=0)
            self.publisher._publish = send

    def apply(self, batch: Decoded) -> None:
        for each in batch.events:
            assert isinstance(each, BlockRemoved)
            self.heard.extend(int(value) for value in each.block_hashes)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Serve replays until `condition` holds."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.publisher.tick()
                await asyncio.sleep(0.005)

    async def hears(self, *expected: int | str) -> None:
        await self.until(lambda: len(self.heard) >= len(expected))
        assert self.heard == list(expected)


@asynccontextmanager
async def listening(rig: Rig, *, replay: bool = True) -> AsyncIterator[Listener]:
    context = zmq.asyncio.Context()
    listener = Listener(
        source=Source(rig.publisher.endpoint, rig.publisher.replay_endpoint if replay else None),
        context=context,
        apply=rig.apply,
        lost=lambda: rig.heard.append("lost"),
        is_current=lambda: rig.current,
    )
    task = asyncio.create_task(listener.run())
    try:
        # it is subscribed once it hears something; a first event that came too early is replayed or lost
        yield listener
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        context.destroy(linger=0)
        rig.publisher.close()


async def subscribed(rig: Rig, listener: Listener) -> None:
    """Publish 0s until one is heard, then forget them."""
    async with asyncio.timeout(PATIENCE_S):
        while not rig.heard:
            rig.publish(0)
            await asyncio.sleep(0.01)
    await rig.until(lambda: listener.next_number == rig.publisher.statistics().next_sequence)
    rig.heard.clear()


async def test_the_past_is_replayed_and_the_present_follows() -> None:
    rig = Rig()
    rig.publish(1, 2, 3)
    async with listening(rig) as listener:
        await rig.until(lambda: listener.next_number == 3)
        await subscribed(rig, listener)
        rig.publish(4, 5)
        await rig.hears(4, 5)
        assert listener.statistics.gaps_total == 0


async def test_a_gap_is_closed_by_a_replay() -> None:
    rig = Rig()
    async with listening(rig) as listener:
        await subscribed(rig, listener)
        rig.miss(1, 2)
        rig.publish(3)
        await rig.hears(1, 2, 3)
        rig.publish(4)
        await rig.hears(1, 2, 3, 4)
        assert (listener.statistics.gaps_total, listener.statistics.lost_total) == (1, 0)


async def test_what_the_buffer_no_longer_has_is_lost() -> None:
    rig = Rig(buffer_batches=2)
    async with listening(rig) as listener:
        await subscribed(rig, listener)
        rig.miss(1, 2, 3)
        rig.publish(4)
        await rig.hears("lost", 3, 4)
        assert listener.statistics.lost_total == 1


async def test_without_a_replay_socket_a_gap_is_lost() -> None:
    rig = Rig()
    async with listening(rig, replay=False) as listener:
        await subscribed(rig, listener)
        rig.miss(1)
        rig.publish(2)
        await rig.hears("lost", 2)


async def test_a_publisher_that_begins_anew() -> None:
    """vLLM does not say that it is another process: its numbers fall back while its clock goes on."""
    rig = Rig()
    async with listening(rig, replay=False) as listener:
        await subscribed(rig, listener)
        rig.publisher._next_sequence = 0
        rig.publish(1, 2)
        await rig.hears("lost", 1, 2)
        assert listener.statistics.restarts_total == 1


async def test_what_was_heard_before_is_dropped() -> None:
    rig = Rig()
    async with listening(rig) as listener:
        await subscribed(rig, listener)
        rig.publish(1)
        await rig.hears(1)
        rig.publisher._next_sequence -= 1
        rig.pending = [event(1)]
        rig.publisher.tick()  # the same number at the same time
        rig.publish(2)
        await rig.hears(1, 2)


@pytest.mark.parametrize("frames", [[b"kv-events"], [b"t", b"short", b"x"], [b"", b"", b"", b""]])
async def test_what_is_no_message_is_counted(frames: list[bytes]) -> None:
    rig = Rig()
    async with listening(rig) as listener:
        await subscribed(rig, listener)
        rig.publisher._publish.send_multipart(frames)
        await rig.until(lambda: listener.statistics.unreadable_total == 1)
        rig.publish(1)
        await rig.hears(1)


async def test_a_batch_that_cannot_be_read_is_a_loss() -> None:
    rig = Rig()
    async with listening(rig, replay=False) as listener:
        await subscribed(rig, listener)
        number = rig.publisher.statistics().next_sequence
        rig.publisher._publish.send_multipart([b"kv-events", number.to_bytes(8, "big"), b"\xc1"])
        rig.publisher._next_sequence += 1
        rig.publish(1)
        await rig.hears("lost", 1)


async def test_it_ends_when_the_source_is_another() -> None:
    rig = Rig()
    context = zmq.asyncio.Context()
    try:
        listener = Listener(
            source=Source(rig.publisher.endpoint, None),
            context=context,
            apply=rig.apply,
            lost=lambda: None,
            is_current=lambda: False,
        )
        async with asyncio.timeout(PATIENCE_S):
            await listener.run()
    finally:
        context.destroy(linger=0)
        rig.publisher.close()
