"""The receiving half of a connection: header, then payload straight to where it belongs.

A DATA payload is received into the cache views that the sink names, and hashed piece by piece while it is still in
the CPU's cache. A payload that nobody wants, or no longer, goes through a small scratch buffer.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Protocol

from xxhash import xxh3_64

from tollbridge.transfer.frames import HEADER_BYTES, Header, Kind, check_body, parse_header
from tollbridge.transfer.writer import IOV_MAX

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
    """See the top of the file. `authenticated` says whether the peer has proven the secret: limits are low before."""

    def __init__(self, sink: Sink, authenticated: Callable[[], bool]) -> None:
        self._sink = sink
        self._authenticated = authenticated
        self._head = bytearray(HEADER_BYTES)
        self._head_view = memoryview(self._head)
        self._head_filled = 0
        self._header: Header | None = None  # of the payload being read
        self._body = bytearray()
        self._views: list[memoryview] = []  # where the rest of the payload goes
        self._drain_bytes = 0
        self._hash = xxh3_64()
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))

    def read(self, sock: socket.socket, budget_bytes: int) -> int:
        """Receive until the kernel is empty or `budget_bytes` are spent; return the bytes received.

        Raises ProtocolError on bytes that the protocol does not allow, OSError when the connection is gone.
        """
        total = 0
        while total < budget_bytes:
            try:
                received = self._receive(sock)
            except BlockingIOError:
                break
            if received == 0:
                raise ConnectionClosedError("the peer closed the connection")
            total += received
        return total

    def detach(self, transfer: bytes) -> None:
        """Stop writing into the blocks of `transfer`: the rest of its current payload, if any, is drained."""
        header = self._header
        if header is not None and header.kind == Kind.DATA and header.transfer == transfer and self._views:
            self._drain_bytes = sum(view.nbytes for view in self._views)
            self._views = []

    def _receive(self, sock: socket.socket) -> int:
        if self._header is None:
            return self._receive_head(sock)
        if self._drain_bytes:
            return self._receive_drained(sock)
        return self._receive_payload(sock)

    def _receive_head(self, sock: socket.socket) -> int:
        received = sock.recv_into(self._head_view[self._head_filled :])
        self._head_filled += received
        if self._head_filled == HEADER_BYTES:
            self._head_filled = 0
            self._begin(parse_header(self._head, authenticated=self._authenticated()))
        return received

    def _begin(self, header: Header) -> None:
        self._header = header
        if header.kind == Kind.DATA:
            views = self._sink.begin_data(header)
            if views is None:
                self._drain_bytes = header.payload_bytes
            else:
                self._views = views
                self._hash.reset()
            return
        self._body = bytearray(header.payload_bytes)
        self._views = [memoryview(self._body)] if self._body else []
        if not self._views:
            self._finish_control(header)

    def _receive_drained(self, sock: socket.socket) -> int:
        received = sock.recv_into(self._scratch[: min(self._drain_bytes, _SCRATCH_BYTES)])
        self._drain_bytes -= received
        if self._drain_bytes == 0:
            self._header = None
        return received

    def _receive_payload(self, sock: socket.socket) -> int:
        header = self._header
        assert header is not None
        received = sock.recvmsg_into(self._views[:IOV_MAX])[0]
        self._advance(received, hashed=header.kind == Kind.DATA)
        if header.kind == Kind.DATA and received:
            self._sink.data_moved(header)
        if self._views or not received:
            return received
        if header.kind == Kind.DATA:
            self._header = None
            self._sink.end_data(header, self._hash.intdigest())
        else:
            self._finish_control(header)
        return received

    def _finish_control(self, header: Header) -> None:
        self._header = None
        check_body(header, self._body)
        self._sink.control(header, self._body)

    def _advance(self, received: int, *, hashed: bool) -> None:
        index = 0
        while index < len(self._views) and received >= self._views[index].nbytes:
            view = self._views[index]
            received -= view.nbytes
            index += 1
            if hashed:
                self._hash.update(view)
        del self._views[:index]
        if received:
            view = self._views[0]
            if hashed:
                self._hash.update(view[:received])
            self._views[0] = view[received:]
