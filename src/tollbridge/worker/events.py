"""KV cache events over ZMQ, in vLLM's format (vllm/distributed/kv_events.py, 0.31).

PUB sends `(topic, sequence number as 8 bytes big-endian, msgpack EventBatch)`. PUB drops silently for a slow listener,
who sees a gap in the sequence and asks the replay socket (ROUTER): one frame with the first number wanted; the answer
is `(topic, number, batch)` for each batch still buffered, then `(topic, -1, b"")`. What is older than the buffer is
gone: the listener must then drop what it knows. Numbers start at 0 in each incarnation.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from tollbridge.clock import Clock
from tollbridge.errors import StartupError
from tollbridge.wire.events import ENCODER, EventBatch, KVEvent

log = logging.getLogger("tollbridge.worker.events")

TOPIC = b"kv-events"
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
BUFFER_BATCHES = 10_000
HIGH_WATER_MARK = 100_000
INTERVAL_S = 0.02  # an event waits so long at most; a replay request too
_MAX_REPLAYS_PER_TICK = 4

Take = Callable[[], list[KVEvent]]


@dataclass(frozen=True, kw_only=True)
class PublisherStatistics:
    next_sequence: int
    num_buffered: int
    events_total: int
    replays_total: int


class EventPublisher:
    """Owns the two sockets. `tick` and `close` belong to one thread; neither blocks."""

    def __init__(self, endpoint: str, take: Take, clock: Clock, *, buffer_batches: int = BUFFER_BATCHES) -> None:
        self._take = take
        self._clock = clock
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_batches)
        self._next_sequence = 0
        self._events_total = 0
        self._replays_total = 0
        self._context = zmq.Context()
        self._publish = self._socket(zmq.PUB, HIGH_WATER_MARK)
        # A peer that asks and does not read is bounded by one buffer's worth; beyond that ROUTER drops.
        self._replay = self._socket(zmq.ROUTER, buffer_batches + 1)
        try:
            self.endpoint = _bind(self._publish, endpoint)
            self.replay_endpoint = _bind(self._replay, endpoint.rpartition(":")[0] + ":0")
        except zmq.ZMQError as error:
            self.close()
            raise StartupError(
                f"The KV events cannot be published on {endpoint}: {error.strerror}. Choose another port, or 0."
            ) from None

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            self.tick()
            await asyncio.sleep(INTERVAL_S)

    def tick(self) -> None:
        """Publish what has happened as one batch, and answer a few waiting replay requests."""
        events = self._take()
        if events:
            self._send(events)
        for _ in range(_MAX_REPLAYS_PER_TICK):
            if not self._answer_replay():
                break

    def close(self) -> None:
        self._publish.close(linger=0)
        self._replay.close(linger=0)
        self._context.term()

    def statistics(self) -> PublisherStatistics:
        return PublisherStatistics(
            next_sequence=self._next_sequence,
            num_buffered=len(self._buffer),
            events_total=self._events_total,
            replays_total=self._replays_total,
        )

    def _send(self, events: list[KVEvent]) -> None:
        payload = ENCODER.encode(EventBatch(ts=self._clock.wall(), events=events, data_parallel_rank=0))
        sequence = self._next_sequence
        self._next_sequence += 1
        self._events_total += len(events)
        self._buffer.append((sequence, payload))
        self._publish.send_multipart((TOPIC, sequence.to_bytes(8, "big"), payload))

    def _answer_replay(self) -> bool:
        """Answer one request; False when none waits."""
        try:
            frames = self._replay.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        if len(frames) != 3 or len(frames[2]) != 8:
            log.warning("a replay request is malformed: frames=%d", len(frames))
            return True
        peer, _, wanted = frames
        first = int.from_bytes(wanted, "big")
        for sequence, payload in self._buffer:
            if sequence >= first:
                self._replay.send_multipart((peer, b"", TOPIC, sequence.to_bytes(8, "big"), payload))
        self._replay.send_multipart((peer, b"", TOPIC, END_OF_REPLAY, b""))
        self._replays_total += 1
        return True

    def _socket(self, kind: int, high_water_mark: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set(zmq.SNDHWM, high_water_mark)
        socket.set(zmq.LINGER, 0)
        return socket


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Bind and return the endpoint with its real port."""
    socket.bind(endpoint.removesuffix(":0") + ":*" if endpoint.endswith(":0") else endpoint)
    bound = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.rstrip(b"\0").decode()
