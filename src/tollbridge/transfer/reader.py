"""The receiving half of a connection: header, then payload straight to where it belongs.

A DATA payload is received into the cache views that the sink names. It comes in batches that fit the CPU's cache, and
each is hashed at once: hashing what is still in L2 costs a fifth of hashing it from memory. A payload that nobody
wants, or no longer, goes through a small scratch buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from xxhash import xxh3_64

from tollbridge.transfer.channel import Channel
from tollbridge.transfer.frames import HEADER_BYTES, Header, Kind, check_body, parse_header
from tollbridge.transfer.writer import IOV_MAX, drop_front

_BATCH_BYTES = 256 * 1024
_SCRATCH_BYTES = 256 * 1024


class Sink(Protocol):
    """Who the reader delivers to."""

    def control(self, header: Header, body: bytearray) -> None: ...

    def begin_data(self, header: Header) -> list[memoryview] | None:
        """Return where the payload goes, None to drain it."""
        ...

    def data_moved(self, header: Header) -> None: ...

    def end_data(self, header: Header, checksum: int) -> None:
        """Take a payload that is wholly where `begin_data` said; not called for a drained one."""
        ...


class ConnectionClosedError(OSError):
    """The peer closed the connection."""


class FrameReader:
    """See the top of the file. `authenticated` says whether the peer has proven the secret; limits are low before."""

    def __init__(self, sink: Sink, authenticated: Callable[[], bool]) -> None:
        self._sink = sink
        self._authenticated = authenticated
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._head_bytes = 0  # of the header, so far
        self._header: Header | None = None  # of the payload being read
        self._left_bytes = 0  # of that payload
        self._draining = False
        self._body = bytearray()  # of a control frame
        self._batches: Iterator[list[memoryview]] = iter(())  # of a DATA frame, after the current one
        self._batch: list[memoryview] = []
        self._hash = xxh3_64()
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))

    def read(self, channel: Channel, budget_bytes: int) -> int:
        """Receive until the kernel is empty or `budget_bytes` are spent; return the bytes received.

        Raises ProtocolError on bytes that the protocol does not allow, OSError when the connection is gone.
        """
        total = 0
        while total < budget_bytes:
            try:
                received = self._receive(channel)
            except BlockingIOError:
                break
            if received == 0:
                raise ConnectionClosedError("the peer closed the connection")
            total += received
        return total

    def detach(self, transfer: bytes) -> None:
        """Stop writing into the blocks of `transfer`: the rest of its current payload, if any, is drained."""
        header = self._header
        if header is not None and header.kind == Kind.DATA and header.transfer == transfer:
            self._draining = True
            self._batches, self._batch = iter(()), []

    def _receive(self, channel: Channel) -> int:
        header = self._header
        if header is None:
            return self._receive_head(channel)
        if self._draining:
            return self._receive_drained(channel)
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
        self._header = header
        self._left_bytes = header.payload_bytes
        if header.kind == Kind.DATA:
            views = self._sink.begin_data(header)
            self._draining = views is None
            self._batches, self._batch = _batches(views or ()), []
            self._hash.reset()
            return
        self._draining = False
        self._body = bytearray(header.payload_bytes)
        if not self._body:
            self._finish_control(header)

    def _receive_drained(self, channel: Channel) -> int:
        received = channel.recv_into(self._scratch[: min(self._left_bytes, _SCRATCH_BYTES)])
        self._left_bytes -= received
        if self._left_bytes == 0:
            self._header = None
        return received

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
        batch = self._batch or next(self._batches)
        self._batch = batch
        received = channel.recvmsg_into(batch)
        if received == 0:
            return 0
        self._left_bytes -= received
        self._batch = self._digest(batch, received)
        self._sink.data_moved(header)
        if self._left_bytes == 0:
            self._header = None
            self._sink.end_data(header, self._hash.intdigest())
        return received

    def _digest(self, batch: list[memoryview], received: int) -> list[memoryview]:
        """Hash the first `received` bytes of `batch` and return the rest of it."""
        update = self._hash.update
        for index, view in enumerate(batch):
            size = len(view)
            if size > received:
                update(view[:received])
                return drop_front(batch[index:], received)
            update(view)
            received -= size
        return []


def _batches(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Cut `views` into lists of about 256 KiB, each small enough for one system call."""
    batch: list[memoryview] = []
    size = 0
    for view in views:
        if len(view) > _BATCH_BYTES:
            if batch:
                yield batch
            yield from ([view[offset : offset + _BATCH_BYTES]] for offset in range(0, len(view), _BATCH_BYTES))
            batch, size = [], 0
            continue
        batch.append(view)
        size += len(view)
        if size >= _BATCH_BYTES or len(batch) == IOV_MAX:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
