"""A network in memory for the TCP medium: sockets and listeners that look real to it, bytes that move only when `pump`
says so, and frames that can be held back or spoiled on the way.
"""

from __future__ import annotations

import errno
import random
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from tollbridge.transfer.frames import HEADER_BYTES, Header, parse_header

Address = tuple[str, int]
Direction = Literal["to_prefill", "to_decode"]
_KERNEL_BYTES = 300  # what a socket takes before it would block; less than most frames, so that they leave in pieces


_BUDGETS = (4096, 4096, 200, 60)  # bytes of a turn: a turn often ends in the middle of a frame


class Spoiled(NamedTuple):
    """What travels instead of a frame; `then_cut` closes the connection behind it, `late` follows the next frame."""

    data: bytes
    then_cut: bool = False
    late: bytes = b""


class Traffic:
    """Who watches a link: may hold a frame back, and says what travels in its place. Here: nothing happens."""

    def holds(self, direction: Direction, header: Header) -> bool:
        return False

    def spoil(self, direction: Direction, header: Header, frame: bytes) -> Spoiled:
        return Spoiled(frame)

    def left(self, direction: Direction, header: Header) -> None:
        """A process has said this frame."""

    def delivered(self, direction: Direction, header: Header) -> None:
        """Bytes of this frame have reached the other side."""


class SimSocket:
    """One end of a simulated TCP connection."""

    family = socket.AF_INET

    def __init__(self, network: SimNetwork) -> None:
        self._network = network
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.connected = False
        self.closed = False
        self.ended = False  # the other end closed: end of file behind the inbox
        self.reset = False  # the other end is gone
        self.error = 0  # of the connect

    def setblocking(self, flag: bool) -> None: ...

    def setsockopt(self, *arguments: object) -> None: ...

    def getsockopt(self, *arguments: object) -> int:
        return self.error

    def getpeername(self) -> Address:
        return ("127.0.0.1", 1)

    def connect_ex(self, address: Address) -> int:
        self._network.dial(self, address)
        return errno.EINPROGRESS

    def shutdown(self, how: int) -> None: ...

    def close(self) -> None:
        self.closed = True

    @property
    def readable(self) -> bool:
        return bool(self.inbox) or self.ended or self.reset

    @property
    def writable(self) -> bool:
        return self.reset or bool(self.error) or (self.connected and len(self.outbox) < _KERNEL_BYTES)

    def recv_into(self, view: memoryview) -> int:
        return self.recvmsg_into([view])[0]

    def recvmsg_into(self, buffers: Sequence[memoryview]) -> tuple[int, list[Any], int, None]:
        assert not self.closed, "a closed socket is read"
        if not self.inbox:
            if self.reset:
                raise ConnectionResetError(errno.ECONNRESET, "reset")
            if self.ended:
                return 0, [], 0, None
            raise BlockingIOError
        limit, total = self._network.piece(len(self.inbox)), 0
        for buffer in buffers:
            size = min(len(buffer), limit - total)
            buffer[:size] = self.inbox[total : total + size]
            total += size
        del self.inbox[:total]
        return total, [], 0, None

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        assert not self.closed, "a closed socket is written"
        if self.reset or self.ended:
            raise BrokenPipeError(errno.EPIPE, "gone")
        room = _KERNEL_BYTES - len(self.outbox)
        if room <= 0:
            raise BlockingIOError
        total = 0
        for buffer in buffers:
            part = buffer[: room - total]
            self.outbox += part
            total += len(part)
        return total


class _Stream:
    """One direction of a link, frame by frame."""

    def __init__(self, direction: Direction, source: SimSocket, target: SimSocket, traffic: Traffic) -> None:
        self.direction = direction
        self._source = source
        self._target = target
        self._traffic = traffic
        self._partial = bytearray()  # of a frame that is not whole yet
        self._frames: deque[tuple[Header, bytes]] = deque()  # whole, not begun to be delivered
        self._leaving = bytearray()  # of the frame that is being delivered
        self._header: Header | None = None  # of that frame
        self._late = b""
        self.cut = False  # close behind what is leaving

    def pump(self, budget: int) -> int:
        """Move up to `budget` bytes towards the target; return how many."""
        if len(self._frames) < 4:
            self._partial += self._source.outbox
            self._source.outbox.clear()
            self._split()
        moved = 0
        while moved < budget and len(self._target.inbox) < _KERNEL_BYTES and self._next():
            piece = self._leaving[: budget - moved]
            del self._leaving[: len(piece)]
            if not self._target.closed:
                self._target.inbox += piece
            moved += len(piece)
            if self._header is not None and piece:
                self._traffic.delivered(self.direction, self._header)
        return moved

    @property
    def empty(self) -> bool:
        return not self._leaving

    @property
    def drained(self) -> bool:
        return not (self._leaving or self._frames or self._partial or self._source.outbox)

    def _split(self) -> None:
        while len(self._partial) >= HEADER_BYTES:
            header = parse_header(bytes(self._partial[:HEADER_BYTES]))
            size = HEADER_BYTES + header.payload_bytes
            if len(self._partial) < size:
                return
            self._traffic.left(self.direction, header)
            self._frames.append((header, bytes(self._partial[:size])))
            del self._partial[:size]

    def _next(self) -> bool:
        """Begin the next frame unless one is leaving; return whether there are bytes to move."""
        while not self._leaving:
            if self.cut or not self._frames or self._traffic.holds(self.direction, self._frames[0][0]):
                return False
            self._header, frame = self._frames.popleft()
            spoiled = self._traffic.spoil(self.direction, self._header, frame)
            self._leaving += spoiled.data + self._late
            self.cut, self._late = spoiled.then_cut, spoiled.late
        return True


class Link:
    """One connection between a decode and a prefill process."""

    def __init__(self, decode: SimSocket, prefill: SimSocket, traffic: Traffic) -> None:
        self.decode = decode
        self.prefill = prefill
        self.stalled = False
        self.bytes_per_turn = 4096
        self._to_prefill = _Stream("to_prefill", decode, prefill, traffic)
        self._to_decode = _Stream("to_decode", prefill, decode, traffic)

    @property
    def dead(self) -> bool:
        return (self.decode.closed or self.decode.reset) and (self.prefill.closed or self.prefill.reset)

    def pump(self, budget: int) -> int:
        """Move up to `budget` bytes each way unless the link is stalled; return how many."""
        if self.stalled:
            return 0
        moved = 0
        for stream in (self._to_prefill, self._to_decode):
            moved += stream.pump(min(budget, self.bytes_per_turn))
            if stream.cut and stream.empty:
                self.reset()
        if self.decode.closed and self._to_prefill.drained:
            self.prefill.ended = True
        if self.prefill.closed and self._to_decode.drained:
            self.decode.ended = True
        return moved

    def reset(self) -> None:
        """Break the connection for both ends."""
        for end in (self.decode, self.prefill):
            end.reset = True


class SimListener:
    """The prefill side's listener."""

    def __init__(self, network: SimNetwork, port: int) -> None:
        self._network = network
        self.port = port
        self.backlog: deque[tuple[SimSocket, Address]] = deque()

    def getsockname(self) -> Address:
        return ("127.0.0.1", self.port)

    def accept(self) -> tuple[SimSocket, Address]:
        if not self.backlog:
            raise BlockingIOError
        return self.backlog.popleft()

    def close(self) -> None:
        self._network.listeners.pop(self.port, None)

    readable = property(lambda self: bool(self.backlog))
    writable = False


class SimNetwork:
    """All links. `traffic_of` names who watches the link to a host."""

    def __init__(self, rng: random.Random, traffic_of: Callable[[str], Traffic]) -> None:
        self._rng = rng
        self._traffic_of = traffic_of
        self.listeners: dict[int, SimListener] = {}
        self.links: dict[str, list[Link]] = {}  # by the host that was dialled

    def piece(self, available: int) -> int:
        """Return how much one receive call gets of what is there."""
        return available if self._rng.random() < 0.7 else self._rng.randint(1, available)

    def listen(self, port: int) -> SimListener:
        listener = self.listeners[port] = SimListener(self, port)
        return listener

    def dial(self, dialler: SimSocket, address: Address) -> None:
        host, port = address
        listener = self.listeners.get(port)
        if listener is None:
            dialler.error = errno.ECONNREFUSED
            return
        accepted = SimSocket(self)
        dialler.connected = accepted.connected = True
        self.links.setdefault(host, []).append(Link(dialler, accepted, self._traffic_of(host)))
        listener.backlog.append((accepted, address))

    def pump(self) -> int:
        moved = 0
        for host, links in list(self.links.items()):
            moved += sum(link.pump(self._rng.choice(_BUDGETS)) for link in links)
            self.links[host] = [link for link in links if not link.dead]
        return moved
