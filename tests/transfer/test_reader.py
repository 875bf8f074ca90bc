"""The reader's own corners: what it waits for, and that it never waits for more than will come."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

import pytest
from xxhash import xxh3_64_intdigest

from tollbridge.transfer.channel import PlainChannel
from tollbridge.transfer.frames import HEADER_BYTES, Header, Kind, encode_header
from tollbridge.transfer.reader import FrameReader
from tollbridge.transfer.stage import NOWHERE, Landing

MIB = 1024 * 1024


class WholeLanding:
    def __init__(self, size: int, batch_bytes: int) -> None:
        self.batch_bytes = batch_bytes
        self.data = bytearray(size)
        self.buffers = (memoryview(self.data),)
        self.closed = False

    def commit(self) -> None: ...

    def close(self) -> None:
        self.closed = True


class Sink:
    def __init__(self) -> None:
        self.landings: list[WholeLanding] = []
        self.batch_bytes = MIB
        self.arrived: list[bytes] = []
        self.has_room = True
        self.wants = True

    def control(self, header: Header, body: bytearray) -> None:
        raise AssertionError("no control frame was sent")

    def begin_data(self, header: Header) -> Landing | None:
        if not self.has_room:
            return None
        if not self.wants:
            return NOWHERE
        self.landings.append(WholeLanding(header.payload_bytes, self.batch_bytes))
        return self.landings[-1]

    def data_moved(self, header: Header) -> None: ...

    def end_data(self, header: Header, checksum: int, landing: Landing) -> None:
        assert checksum == header.payload_checksum
        self.arrived.append(bytes(landing.buffers[0]))


class Rig:
    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.there = socket.create_connection(listener.getsockname())
        self._here = listener.accept()[0]
        listener.close()
        self._here.setblocking(False)
        self.channel, self.sink = PlainChannel(self._here), Sink()
        self.reader = FrameReader(self.sink, lambda: True)

    def read(self, budget_bytes: int = 64 * MIB) -> int:
        """Wait until the selector would report the socket, and read."""
        assert select.select([self._here], [], [], 10)[0], "the selector does not report what is there"
        return self.reader.read(self.channel, budget_bytes)

    def close(self) -> None:
        self._here.close()
        self.there.close()


def frame(payload: bytes) -> bytes:
    header = Header(Kind.DATA, 0, b"t" * 16, 0, 0, 0, 1, 0, 1, len(payload), xxh3_64_intdigest(payload))
    return encode_header(header) + payload


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def test_a_large_payload_is_not_read_in_small_pieces(rig: Rig) -> None:
    data = frame(bytes(3 * MIB))
    rig.there.sendall(data[: HEADER_BYTES + 1000])
    assert rig.read() == HEADER_BYTES + 1000
    rig.there.sendall(data[HEADER_BYTES + 1000 : 100_000])
    assert select.select([rig.channel.sock], [], [], 0)[0] == []
    rest, sent = memoryview(data)[100_000:], 0
    rig.there.setblocking(False)
    while sent < len(rest) or not rig.sink.arrived:
        if sent < len(rest) and select.select([], [rig.there], [], 0)[1]:
            sent += rig.there.send(rest[sent:])
        if select.select([rig.channel.sock], [], [], 0)[0]:
            rig.reader.read(rig.channel, MIB)
    assert rig.sink.arrived == [bytes(3 * MIB)]


def test_a_slow_link_does_not_wake_it_for_every_packet(rig: Rig) -> None:
    rig.sink.batch_bytes = 256 * 1024
    data = frame(b"x" * 100_000)
    rig.there.sendall(data[: HEADER_BYTES + 1000])
    assert rig.read() == HEADER_BYTES + 1000
    rig.there.sendall(data[HEADER_BYTES + 1000 : 60_000])
    assert select.select([rig.channel.sock], [], [], 0)[0] == []
    rig.there.sendall(data[60_000:80_000])
    rig.read()
    rig.there.sendall(data[80_000:])
    rig.read()
    assert rig.sink.arrived == [b"x" * 100_000]


def test_what_is_left_of_a_payload_is_enough(rig: Rig) -> None:
    data = frame(b"x" * 100_000)
    for end, start in ((5_000, 0), (len(data), 5_000)):
        rig.there.sendall(data[start:end])
        rig.read()
    assert rig.sink.arrived == [b"x" * 100_000]


def test_a_small_frame_behind_a_spent_budget(rig: Rig) -> None:
    first, second = frame(b"x" * 100_000), frame(b"y" * 10)
    rig.there.sendall(first[:5_000])
    rig.read()
    rig.there.sendall(first[5_000:])
    assert rig.read(budget_bytes=len(first) - 5_000) == len(first) - 5_000  # and not a byte more: it stops here
    rig.there.sendall(second)
    rig.read()
    assert rig.sink.arrived == [b"x" * 100_000, b"y" * 10]


def test_no_room_then_room(rig: Rig) -> None:
    rig.sink.has_room = False
    rig.there.sendall(frame(b"x" * 100))
    rig.read()
    assert rig.reader.waiting
    assert rig.reader.read(rig.channel, MIB) == 0
    rig.sink.has_room = True
    rig.reader.read(rig.channel, MIB)
    assert not rig.reader.waiting
    assert rig.sink.arrived == [b"x" * 100]


def test_released_while_it_waits_for_room(rig: Rig) -> None:
    rig.sink.has_room = False
    rig.there.sendall(frame(b"x" * 100) + frame(b"y" * 50))
    rig.read()
    rig.reader.release(b"t" * 16)
    rig.sink.has_room = True
    rig.reader.read(rig.channel, MIB)
    assert rig.sink.landings[0].closed
    assert rig.sink.arrived == [b"y" * 50]


def test_what_nobody_wants_is_drained(rig: Rig) -> None:
    rig.sink.wants = False
    rig.there.sendall(frame(b"x" * 1000))
    rig.read()
    rig.sink.wants = True
    rig.there.sendall(frame(b"y"))
    rig.read()
    assert rig.sink.arrived == [b"y"]
