"""A proxy between decode and prefill that understands KV frames and can spoil them.

    proxy = KvProxy(sender.address, fault=corrupt_payload(2))
    ... LoadRequest(host=proxy.address[0], port=proxy.address[1], ...)
    proxy.close()

A fault is called with every frame from prefill to decode, in order, and returns what to forward instead. `cut`, `stall`
and `resume` act on all connections at any time. Bytes are counted per connection and direction, as they were received.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest

from tollbridge.transfer.frames import HEADER_BYTES, Header, Kind, encode_header, parse_header


class Frame(NamedTuple):
    """One frame on its way to decode."""

    header: Header
    head: bytes  # the 64 bytes of the header
    payload: bytes

    @property
    def is_data(self) -> bool:
        return self.header.kind == Kind.DATA

    @property
    def data(self) -> bytes:
        return self.head + self.payload


class CutError(Exception):
    """Raised by a fault: forward `last`, then close the connection."""

    def __init__(self, last: bytes = b"") -> None:
        super().__init__("cut")
        self.last = last


Fault = Callable[[Frame], Iterable[bytes]]


def forward(frame: Frame) -> list[bytes]:
    """Change nothing."""
    return [frame.data]


def corrupt_payload(nth: int) -> Fault:
    """Flip one bit in the payload of the nth DATA frame (from 0); its checksum stays as it was."""

    def spoil(frame: Frame) -> list[bytes]:
        payload = bytearray(frame.payload)
        payload[len(payload) // 2] ^= 0x10
        return [frame.head, bytes(payload)]

    return _nth_data(nth, spoil)


def corrupt_header(nth: int) -> Fault:
    """Flip one bit in the header of the nth DATA frame; its checksum stays as it was."""

    def spoil(frame: Frame) -> list[bytes]:
        head = bytearray(frame.head)
        head[36] ^= 0x01  # first_token
        return [bytes(head), frame.payload]

    return _nth_data(nth, spoil)


def zero_payloads() -> Fault:
    """Replace every DATA payload by zeros with matching checksums: damage that only the tokens can show."""

    def spoil(frame: Frame) -> list[bytes]:
        if not frame.is_data:
            return [frame.data]
        zeros = bytes(len(frame.payload))
        header = frame.header._replace(payload_checksum=xxh3_64_intdigest(zeros))
        return [encode_header(header), zeros]

    return spoil


def rewrite_header(nth: int, **fields: Any) -> Fault:
    """Change fields of the nth DATA header, with a matching checksum."""
    return _nth_data(nth, lambda frame: [encode_header(frame.header._replace(**fields)), frame.payload])


def duplicate_data() -> Fault:
    """Send every DATA frame twice."""
    return lambda frame: [frame.data, frame.data] if frame.is_data else [frame.data]


def drop_data(nth: int) -> Fault:
    """Swallow the nth DATA frame."""
    return _nth_data(nth, lambda frame: [])


def reorder_data() -> Fault:
    """Swap neighbouring DATA frames; a frame that is held back leaves with the next frame of any kind."""
    held: list[bytes] = []

    def swap(frame: Frame) -> list[bytes]:
        if frame.is_data and not held:
            held.append(frame.data)
            return []
        out = [frame.data, *held]
        held.clear()
        return out

    return swap


def truncate(nth: int, keep_bytes: int) -> Fault:
    """Forward `keep_bytes` of the nth DATA frame, then close the connection."""

    def spoil(frame: Frame) -> list[bytes]:
        raise CutError(frame.data[:keep_bytes])

    return _nth_data(nth, spoil)


def shorten(nth: int, lost_bytes: int) -> Fault:
    """Lose the last bytes of the nth DATA frame; the stream goes on behind it."""
    return _nth_data(nth, lambda frame: [frame.data[:-lost_bytes]])


def slow(frame_s: float) -> Fault:
    """Take `frame_s` for every DATA frame."""

    def delay(frame: Frame) -> list[bytes]:
        if frame.is_data:
            time.sleep(frame_s)
        return [frame.data]

    return delay


def _nth_data(nth: int, spoil: Fault) -> Fault:
    seen = 0

    def fault(frame: Frame) -> Iterable[bytes]:
        nonlocal seen
        if not frame.is_data:
            return [frame.data]
        seen += 1
        return spoil(frame) if seen == nth + 1 else [frame.data]

    return fault


@dataclass
class Proxied:
    """One proxied connection and its byte counts."""

    decode: socket.socket
    prefill: socket.socket
    bytes_to_prefill: int = 0
    bytes_to_decode: int = 0
    threads: list[threading.Thread] = field(default_factory=list)

    def cut(self) -> None:
        for sock in (self.decode, self.prefill):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class KvProxy:
    """See the top of the file. Listens on a free port of 127.0.0.1 from construction on."""

    def __init__(self, target: tuple[str, int], *, fault: Fault = forward) -> None:
        self._target = target
        self.fault = fault  # may be replaced between transfers
        self.connections: list[Proxied] = []
        self.data_seen = threading.Event()  # a DATA frame has come from prefill
        self._flowing = threading.Event()
        self._flowing.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._acceptor = threading.Thread(target=self._accept, name="kv-proxy", daemon=True)
        self._acceptor.start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return host, port

    def cut(self) -> None:
        """Close every connection on both sides."""
        self._flowing.set()
        for connection in self.connections:
            connection.cut()

    def stall(self) -> None:
        """Stop forwarding in both directions; connections stay open."""
        self._flowing.clear()

    def resume(self) -> None:
        self._flowing.set()

    def close(self) -> None:
        """Cut everything and join the threads."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        self.cut()
        for connection in self.connections:
            for thread in connection.threads:
                thread.join()
            connection.decode.close()
            connection.prefill.close()

    def __enter__(self) -> KvProxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                decode, _ = self._listener.accept()
            except OSError:
                return
            try:
                prefill = socket.create_connection(self._target)
            except OSError:
                decode.close()
                continue
            connection = Proxied(decode, prefill)
            self.connections.append(connection)
            for pump in (self._pump_to_prefill, self._pump_to_decode):
                thread = threading.Thread(target=self._run, args=(pump, connection), name="kv-proxy-pump", daemon=True)
                connection.threads.append(thread)
                thread.start()

    def _run(self, pump: Callable[[Proxied], None], connection: Proxied) -> None:
        with suppress(OSError):
            pump(connection)
        connection.cut()

    def _pump_to_prefill(self, connection: Proxied) -> None:
        while data := connection.decode.recv(65536):
            connection.bytes_to_prefill += len(data)
            self._flowing.wait()
            connection.prefill.sendall(data)

    def _pump_to_decode(self, connection: Proxied) -> None:
        while head := _read(connection.prefill, HEADER_BYTES):
            header = parse_header(head)
            frame = Frame(header, head, _read(connection.prefill, header.payload_bytes))
            connection.bytes_to_decode += len(frame.data)
            if frame.is_data:
                self.data_seen.set()
            self._flowing.wait()
            try:
                for data in self.fault(frame):
                    connection.decode.sendall(data)
            except CutError as cut:
                connection.decode.sendall(cut.last)
                return


def _read(sock: socket.socket, size: int) -> bytes:
    """Return exactly `size` bytes; OSError when the connection ends before."""
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        received = sock.recv_into(view[filled:])
        if received == 0:
            raise ConnectionError("the connection ended")
        filled += received
    return bytes(data)
