"""What an engine's process and its I/O process say to each other (outboard.py), and the pipe that carries it."""

from __future__ import annotations

import socket
import struct
import threading
from typing import Literal

import msgspec

from tollbridge.transfer.base import Fingerprint, LoadRequest, TransferEnd
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.shared import DeviceLayout, Layout

_LENGTH_BYTES = 4
NUM_WAITS = 20  # parts of a deadline; of a pause in which this process does not run either, only one of them passes


class Start(msgspec.Struct, frozen=True, tag=True):
    """Be this side. The first order."""

    side: Literal["send", "receive"]
    options: TransferOptions
    fingerprint: Fingerprint
    layout: Layout | DeviceLayout
    log_level: int


class Register(msgspec.Struct, frozen=True, tag=True):
    transfer_id: str
    digest: bytes
    num_tokens: int


class Publish(msgspec.Struct, frozen=True, tag=True):
    transfer_id: str
    block_table: tuple[int, ...] | None  # None: as it was said last
    num_tokens: int
    layer: int | None


class Rewind(msgspec.Struct, frozen=True, tag=True):
    """Answered when no thread reads the blocks."""

    transfer_id: str


class Shed(msgspec.Struct, frozen=True, tag=True):
    transfer_ids: tuple[str, ...]
    max_blocks: int
    unsent_too: bool


class Load(msgspec.Struct, frozen=True, tag=True):
    request: LoadRequest


class Abandon(msgspec.Struct, frozen=True, tag=True):
    """Cancel a transfer."""

    transfer_id: str
    detail: str


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """Answered with the gauges; `check` the invariants too."""

    check: bool


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The side is up; a sender listens there."""

    address: tuple[str, int]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The side cannot be: the error's class and message."""

    kind: str
    message: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    ends: tuple[TransferEnd, ...]


class Answer(msgspec.Struct, frozen=True, tag=True):
    """To Rewind and Inspect, in their order."""

    num_connections: int = 0
    num_connections_by_medium: dict[str, int] = {}
    goodput_bytes_per_s: float = 0.0
    pending_bytes: int = 0
    broken: str = ""  # the invariant that is


class Copy(msgspec.Struct, frozen=True, array_like=True):
    """Copy granules of `num_layers` layers to a slot of the ring (`out`), or from it; see copies.py."""

    out: bool
    slot: int
    layer: int
    num_layers: int
    blocks: tuple[int, ...]
    first_token: int  # counted from the first of `blocks`
    num_tokens: int


class Copied(msgspec.Struct, frozen=True, array_like=True):
    """So many copies are done since the beginning."""

    total: int


Order = Start | Register | Publish | Rewind | Shed | Load | Abandon | Inspect
Report = Ready | Refused | Ended | Answer


class Pipe:
    """One end of a stream socket between two processes of one host. Any thread may send, one receives.

    `send_timeout_s`: how long the other end may take nothing; None: for ever.
    """

    def __init__(self, sock: socket.socket, *, send_timeout_s: float | None = None) -> None:
        if send_timeout_s is not None:  # not `settimeout`, which would bound reading, too
            seconds, rest = divmod(send_timeout_s / NUM_WAITS, 1)
            sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(seconds), int(rest * 1e6) or 1)
            )
        self._sock = sock
        self._file = sock.makefile("rb")
        self._lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: Order | Report | Copy | Copied) -> None:
        """Raises OSError when the other end is gone, TimeoutError, which is one, when it takes nothing."""
        body = self._encoder.encode(message)
        with self._lock:
            self._send(memoryview(len(body).to_bytes(_LENGTH_BYTES) + body))

    def _send(self, data: memoryview) -> None:
        num_waits = 0
        while data:
            try:
                data, num_waits = data[self._sock.send(data) :], 0
            except BlockingIOError:
                num_waits += 1
                if num_waits == NUM_WAITS:
                    raise TimeoutError("the other end of the pipe takes nothing") from None

    def say(self, message: Copied) -> None:
        """Send; lost when the other end is gone."""
        try:
            self.send(message)
        except OSError:
            return

    def receive(self) -> bytes | None:
        """Wait for the next message; None when the other end is closed, also within a message: it died."""
        try:
            head = self._file.read(_LENGTH_BYTES)
            size = int.from_bytes(head) if len(head) == _LENGTH_BYTES else 0
            body = self._file.read(size)
        except ConnectionError:
            return None
        return body if size and len(body) == size else None

    def shut(self) -> None:
        """Say no more: the other end sees the end of the stream, and may still finish what it says."""
        with self._lock:
            try:
                self._sock.shutdown(socket.SHUT_WR)
            except OSError:
                return  # the other end is gone

    def break_off(self) -> None:
        """Let both ends see the end of the stream."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end is gone

    def close(self) -> None:
        self._file.close()
        self._sock.close()


orders = msgspec.msgpack.Decoder(Order)
reports = msgspec.msgpack.Decoder(Report)
copies = msgspec.msgpack.Decoder(Copy)
copied = msgspec.msgpack.Decoder(Copied)
