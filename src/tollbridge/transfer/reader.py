"""The receiving half of a connection: header, then payload straight to where it belongs.

A DATA payload is received into the buffers of the landing that the sink names, in batches of the landing's size, and
each is hashed at once. A payload that nobody wants, or no longer, goes through a small scratch buffer. When the sink
has no room for a payload, the reader waits with it: `waiting` says so, and the next `read` asks again.

Where payloads are placed in a ring (placed.py), a DATA header is all that arrives, and the payload is copied from its
slot and hashed where it then lies.

`release` may be called from any thread: `_lock` is held whenever a payload is written or the landing changes hands, and
never while the sink is called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from xxhash import xxh3_64

from tollbridge.transfer.channel import Channel
from tollbridge.transfer.frames import HEADER_BYTES, Header, Kind, check_body, parse_header
from tollbridge.transfer.placed import Inlet
from tollbridge.transfer.stage import Landing
from tollbridge.transfer.writer import IOV_MAX, drop_front

_SCRATCH_BYTES = 256 * 1024
# What of a payload must lie in the kernel before it is worth waking up. A slow link delivers it packet by packet, and
# each time costs 60 us of Python: at 200 Mb/s a quarter of a core, which the engine may be using.
_AWAITED_BYTES = 64 * 1024
_COARSE_BYTES = 1024 * 1024  # where batches are so large: the interpreter lock is what is short


class Sink(Protocol):
    """Who the reader delivers to."""

    def control(self, header: Header, body: bytearray) -> None: ...

    def begin_data(self, header: Header) -> Landing | None:
        """Return where the payload goes, NOWHERE to drain it, None when there is no room now."""
        ...

    def data_moved(self, header: Header) -> None:
        """Bytes of this payload arrived; said once per frame and once at the end of a `read` inside one."""
        ...

    def end_data(self, header: Header, checksum: int, landing: Landing) -> None:
        """Take a payload that is wholly in `landing`, and commit or close that; not called for a drained one."""
        ...


class ConnectionClosedError(OSError):
    """The peer closed the connection."""


class FrameReader:
    """See the top of the file. `authenticated` says whether the peer has proven the secret; limits are low before.

    `given_back` hears of each slot that is free again, by the number of them since the beginning.
    """

    def __init__(
        self, sink: Sink, authenticated: Callable[[], bool], given_back: Callable[[int], None] = lambda total: None
    ) -> None:
        self._sink = sink
        self._authenticated = authenticated
        self._given_back = given_back
        self.inlet: Inlet | None = None  # where payloads lie; None: they come through the channel
        self._lock = threading.Lock()
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._head_bytes = 0  # of the header, so far
        self._header: Header | None = None  # of the payload being read
        self._left_bytes = 0  # of that payload
        self._body = bytearray()  # of a control frame
        self._landing: Landing | None = None  # of a DATA frame; None: drained, or not known yet
        self._waiting = False  # for the sink to have room
        self._released = False  # the transfer of this DATA frame ended while it was read
        self._batches: Iterator[tuple[list[memoryview], int]] = iter(())  # of a DATA frame, after the current one
        self._batch: list[memoryview] = []
        self._batch_bytes = 0  # in it
        self._worth_bytes = 1  # of it must have come before it is worth waking up
        self._placed_bytes = 0  # taken from the ring, not counted yet
        self._moved = False  # bytes of a DATA frame that is not whole yet, which the sink has not heard of
        self._hash = xxh3_64()
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))

    @property
    def waiting(self) -> bool:
        """Whether the sink had no room for the payload that comes next."""
        return self._waiting

    @property
    def in_frame(self) -> bool:
        """Whether the rest of a frame is still to come."""
        return self._header is not None or self._head_bytes > 0

    def read(self, channel: Channel, budget_bytes: int) -> int:
        """Receive until the kernel is empty or `budget_bytes` are spent; return the bytes received.

        Raises ProtocolError on bytes that the protocol does not allow, OSError when the connection is gone.
        """
        total, awaited_bytes = 0, 1  # what is there when the loop ends otherwise may be little, and all there is
        while total < budget_bytes and not (self._waiting and not self._land()):
            try:
                received = self._receive(channel)
            except BlockingIOError:
                awaited_bytes = max(1, min(self._left_bytes, self._worth_bytes))
                break
            if received == 0:
                raise ConnectionClosedError("the peer closed the connection")
            total += received + self._placed_bytes
            self._placed_bytes = 0
        channel.await_bytes(awaited_bytes)
        if self._moved and self._header is not None:
            self._moved = False
            self._sink.data_moved(self._header)
        return total

    def release(self, transfer: bytes) -> None:
        """Stop writing into the blocks of `transfer`: the rest of its current payload, if any, is drained."""
        with self._lock:
            header = self._header
            if header is not None and header.kind == Kind.DATA and header.transfer == transfer:
                self._released = True
                self._give_up()

    def close(self) -> None:
        """Write into no blocks any more: the connection is gone."""
        with self._lock:
            self._give_up()
            if self.inlet is not None:
                self.inlet.close()

    def _give_up(self) -> None:
        if self._landing is not None:
            self._landing.close()
        self._landing = None
        self._worth_bytes = 1
        self._batches, self._batch = iter(()), []

    def _receive(self, channel: Channel) -> int:
        header = self._header
        if header is None:
            return self._receive_head(channel)
        if header.kind == Kind.DATA:
            return self._receive_data(channel, header)
        return self._receive_body(channel, header)

    def _receive_head(self, channel: Channel) -> int:
        received = channel.recv_into(self._head[self._head_bytes :])
        self._head_bytes += received
        if self._head_bytes == HEADER_BYTES:
            self._head_bytes = 0
            self._begin(parse_header(self._head, authenticated=self._authenticated()))
        return received

    def _begin(self, header: Header) -> None:
        self._left_bytes = header.payload_bytes
        if header.kind == Kind.DATA:
            self._released = False
            self._header = header  # from here on `release` finds it
            self._waiting = True
            self._land()
            return
        self._header = header
        self._body = bytearray(header.payload_bytes)
        if not self._body:
            self._finish_control(header)

    def _land(self) -> bool:
        """Ask the sink where the payload goes; return whether it has room."""
        assert self._header is not None
        landing = self._sink.begin_data(self._header)
        if landing is None:
            return False
        self._waiting = False
        self._hash.reset()
        with self._lock:
            if self._released or not landing.buffers:
                landing.close()
            else:
                self._landing = landing
                self._batches, self._batch = _batches(landing.buffers, landing.batch_bytes), []
                self._worth_bytes = _COARSE_BYTES if landing.batch_bytes >= _COARSE_BYTES else _AWAITED_BYTES
        if self.inlet is not None:
            self._take_placed(self._header, self.inlet)
        return True

    def _take_placed(self, header: Header, inlet: Inlet) -> None:
        """Take a whole payload from its slot, and give that back."""
        with self._lock:
            landing, payload = self._landing, inlet.payload(header.payload_bytes)
            if landing is not None:
                landing.fill(payload)
                for view in landing.buffers:
                    self._hash.update(view)
            self._left_bytes = 0
            self._header = self._landing = None
            self._worth_bytes = 1
            self._batches = iter(())
        self._placed_bytes += header.payload_bytes
        self._given_back(inlet.advance())
        if landing is not None:
            self._sink.data_moved(header)
            self._sink.end_data(header, self._hash.intdigest(), landing)

    def _receive_body(self, channel: Channel, header: Header) -> int:
        received = channel.recv_into(memoryview(self._body)[-self._left_bytes :])
        self._left_bytes -= received
        if self._left_bytes == 0:
            self._finish_control(header)
        return received

    def _finish_control(self, header: Header) -> None:
        self._header = None
        check_body(header, self._body)
        self._sink.control(header, self._body)

    def _receive_data(self, channel: Channel, header: Header) -> int:
        with self._lock:
            landing = self._landing
            received = self._receive_drained(channel) if landing is None else self._receive_landed(channel)
            self._left_bytes -= received
            if self._left_bytes == 0:
                self._header = self._landing = None
                self._worth_bytes = 1
        if landing is not None and received:
            self._moved = self._left_bytes > 0
            if not self._moved:
                self._sink.data_moved(header)
                self._sink.end_data(header, self._hash.intdigest(), landing)
        return received

    def _receive_drained(self, channel: Channel) -> int:
        return channel.recv_into(self._scratch[: min(self._left_bytes, _SCRATCH_BYTES)])

    def _receive_landed(self, channel: Channel) -> int:
        if not self._batch:
            self._batch, self._batch_bytes = next(self._batches)
        received = channel.recvmsg_into(self._batch)
        self._batch_bytes -= received
        update = self._hash.update
        if self._batch_bytes:
            rest = drop_front(self._batch, received)
            for view in self._batch[: -len(rest)]:
                update(view)
            cut = self._batch[-len(rest)]
            update(cut[: len(cut) - len(rest[0])])
            self._batch = rest
        else:
            for view in self._batch:
                update(view)
            self._batch = []
        return received


def _batches(views: Sequence[memoryview], batch_bytes: int) -> Iterator[tuple[list[memoryview], int]]:
    """Cut `views` into lists of about `batch_bytes`, each small enough for one system call; each with its size."""
    batch: list[memoryview] = []
    size = 0
    for view in views:
        view_bytes = len(view)
        if view_bytes > batch_bytes:
            if batch:
                yield batch, size
            for offset in range(0, view_bytes, batch_bytes):
                part = view[offset : offset + batch_bytes]
                yield [part], len(part)
            batch, size = [], 0
            continue
        batch.append(view)
        size += view_bytes
        if size >= batch_bytes or len(batch) == IOV_MAX:
            yield batch, size
            batch, size = [], 0
    if batch:
        yield batch, size
