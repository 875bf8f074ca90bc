"""KV events over real ZMQ sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import zmq

from tests.support.fake_engine import FakeEngine
from tests.worker.support import serving
from tollbridge.clock import ManualClock, SystemClock
from tollbridge.errors import StartupError
from tollbridge.wire.events import DECODER, AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVEvent
from tollbridge.worker.events import END_OF_REPLAY, TOPIC, EventPublisher

STORED = BlockStored(
    block_hashes=[7, 8], parent_block_hash=None, token_ids=list(range(32)), block_size=16, medium="GPU"
)
REMOVED = BlockRemoved(block_hashes=[7], medium="GPU")
TIMEOUT_MS = 60_000


class Rig:
    """A publisher whose events come from a list, and sockets to listen with."""

    def __init__(self) -> None:
        self.events: list[KVEvent] = []
        self.context = zmq.Context()
        self.sockets: list[zmq.Socket[bytes]] = []
        self.publisher = EventPublisher("tcp://127.0.0.1:0", self._take, ManualClock(), buffer_batches=3)

    def _take(self) -> list[KVEvent]:
        events, self.events = self.events, []
        return events

    def publish(self, *events: KVEvent) -> None:
        self.events.extend(events)
        self.publisher.tick()

    def subscribe(self) -> zmq.Socket[bytes]:
        """Return a SUB that is really subscribed, having read what that took to find out."""
        sub = self.connect(zmq.SUB, self.publisher.endpoint)
        sub.setsockopt(zmq.SUBSCRIBE, TOPIC)
        for _ in range(6000):
            self.publish(AllBlocksCleared())
            if sub.poll(10):
                break
        while self.publisher.statistics().next_sequence - 1 > int.from_bytes(self.receive(sub)[1], "big"):
            pass
        return sub

    def connect(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        self.sockets.append(socket)
        socket.connect(endpoint)
        return socket

    def close(self) -> None:
        self.publisher.close()
        for socket in self.sockets:
            socket.close(linger=0)
        self.context.term()

    def receive(self, socket: zmq.Socket[bytes]) -> list[bytes]:
        assert socket.poll(TIMEOUT_MS), "nothing came"
        return socket.recv_multipart()

    def replay(self, first: int) -> list[tuple[int, bytes]]:
        asker = self.connect(zmq.DEALER, self.publisher.replay_endpoint)
        asker.send_multipart([b"", first.to_bytes(8, "big")])
        answers = []
        while True:
            while not asker.poll(5):
                self.publisher.tick()
            empty, topic, sequence, payload = asker.recv_multipart()
            assert (empty, topic) == (b"", TOPIC)
            if sequence == END_OF_REPLAY:
                assert payload == b""
                return answers
            answers.append((int.from_bytes(sequence, "big"), payload))


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def test_a_batch_is_topic_sequence_and_events(rig: Rig) -> None:
    sub = rig.subscribe()
    before = rig.publisher.statistics().next_sequence
    rig.publish(STORED, REMOVED)
    topic, sequence, payload = rig.receive(sub)
    assert topic == b"kv-events"
    assert int.from_bytes(sequence, "big") == before
    assert DECODER.decode(payload) == EventBatch(ts=1000.0, events=[STORED, REMOVED], data_parallel_rank=0)


def test_numbers_start_at_zero_and_have_no_gaps(rig: Rig) -> None:
    assert rig.publisher.statistics().next_sequence == 0
    rig.publish()
    assert rig.publisher.statistics().next_sequence == 0, "no events, no message"
    sub = rig.subscribe()
    numbers = []
    for _ in range(5):
        rig.publish(REMOVED)
        numbers.append(int.from_bytes(rig.receive(sub)[1], "big"))
    assert numbers == list(range(numbers[0], numbers[0] + 5))


def test_replay_repeats_what_is_buffered(rig: Rig) -> None:
    for _ in range(5):
        rig.publish(STORED)
    assert [sequence for sequence, _ in rig.replay(0)] == [2, 3, 4], "the buffer holds three"
    assert [sequence for sequence, _ in rig.replay(4)] == [4]
    assert rig.replay(99) == []
    assert DECODER.decode(rig.replay(4)[0][1]).events == [STORED]
    assert rig.publisher.statistics().replays_total == 4


def test_malformed_replay_requests_are_ignored(rig: Rig) -> None:
    asker = rig.connect(zmq.DEALER, rig.publisher.replay_endpoint)
    for frames in ([b"x"], [b"", b"short"], [b"", b"a", b"b", b"c"]):
        asker.send_multipart(frames)
    rig.publish(STORED)
    assert len(rig.replay(0)) == 1
    assert not asker.poll(0)


def test_a_taken_port_is_a_startup_error(rig: Rig) -> None:
    with pytest.raises(StartupError, match="KV events"):
        EventPublisher(rig.publisher.endpoint, list, ManualClock())


async def test_the_server_publishes_the_engines_events() -> None:
    engine = FakeEngine()
    publisher = EventPublisher("tcp://127.0.0.1:0", engine.take_events, SystemClock())
    context = zmq.Context()
    sub = context.socket(zmq.SUB)
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    sub.connect(publisher.endpoint)
    try:
        async with serving(engine, publisher):
            for _ in range(6000):
                engine.events = [STORED]
                await asyncio.sleep(0.01)
                if sub.poll(0):
                    break
            assert DECODER.decode(sub.recv_multipart()[2]).events == [STORED]
    finally:
        publisher.close()
        sub.close(linger=0)
        context.term()
        engine.shutdown()
