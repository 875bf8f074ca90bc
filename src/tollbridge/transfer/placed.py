"""Payloads that do not travel on the connection: they are *placed* in a ring of the receiver, by memory or by a NIC.

    prefill                                                  decode
    wait for a free slot, put the payload there
    DATA header over TCP, with the checksum         ->       copy the slot to the blocks, hash what is there now
                                                    <-       CREDIT: so many slots were given back so far

All else (handshake, OPEN, STATE, CANCEL, headers) stays on the TCP connection, so there is one protocol, and one set of
books, for all media. Once a ring was agreed on in the handshake, every DATA frame of that connection is placed, in the
slots one after the other: neither side names one.

Never wrong. Only decode's own threads write into blocks, under the lock and at the moments at which they would have
received from the socket; the peer writes into the ring and nowhere else. The checksum is taken over the blocks after
the copy, so a write that was torn, late, or of another connection makes a transfer fail and is never accepted.

Bounded. A ring is all the memory that a connection uses beside the caches. No credit, no frame: what may leave stays
in the books, and a peer that gives no slot back for the progress timeout loses the connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tollbridge.errors import ProtocolError
from tollbridge.transfer.messages import Ring
from tollbridge.transfer.stage import Parcel

TCP = "tcp"


class Outlet(Protocol):
    """Prefill's end of a ring. Used by one thread at a time: its writer holds a lock."""

    medium: str
    max_payload_bytes: int  # of a slot

    def has_room(self) -> bool: ...

    def freed(self, total: int) -> None:
        """Decode gave `total` slots back since the beginning. ProtocolError when it cannot have."""
        ...

    def begin(self, parcel: Parcel) -> None:
        """Begin to bring a payload to the next slot; one at a time."""
        ...

    def maybe_placed(self) -> int | None:
        """Return the checksum of the payload that was begun once it is there. OSError when it never will be."""
        ...

    def settle(self) -> None:
        """Return when nothing reads the memory of the parcel that was begun, if any."""
        ...

    def close(self) -> None:
        """Settle, and let go of the ring."""
        ...


class Inlet(Protocol):
    """Decode's end of a ring, which is its memory. Used by the connection's I/O thread."""

    medium: str

    def ring(self) -> Ring:
        """Return what prefill must know."""
        ...

    def payload(self, num_bytes: int) -> memoryview:
        """Return the front of the slot that is next. ProtocolError when it has fewer bytes."""
        ...

    def advance(self) -> int:
        """Give that slot back; return how many were since the beginning."""
        ...

    def taken(self) -> None:
        """Prefill has the ring: nobody else shall find it."""
        ...

    def close(self) -> None:
        """Let go of the ring: the connection is gone, or prefill did not take it."""
        ...


class Routes(Protocol):
    """What a side can do, and the rings that it makes or takes. One for all of its connections."""

    def names(self, same_host: Callable[[], bool]) -> tuple[str, ...]:
        """Return the media that a connection may use, the best first."""
        ...

    def inlet(self, medium: str) -> Inlet:
        """Make a ring. TransferError when it cannot be made here."""
        ...

    def outlet(self, ring: Ring) -> Outlet:
        """Take a ring of the peer. TransferError when it cannot be reached from here."""
        ...

    def stir(self) -> None:
        """Payloads are expected from now on, as long as the side is busy."""
        ...

    def close(self) -> None: ...


class OnlyTcp:
    """Routes of a side that knows of no ring."""

    def names(self, same_host: Callable[[], bool]) -> tuple[str, ...]:
        return (TCP,)

    def inlet(self, medium: str) -> Inlet:
        raise ProtocolError(f"There is no ring for {medium} here.")

    def outlet(self, ring: Ring) -> Outlet:
        raise ProtocolError(f"There is no way to a ring of {ring.medium} here.")

    def stir(self) -> None:
        """Nothing to stir."""

    def close(self) -> None:
        """Nothing to free."""


class Credits:
    """Which slot comes next, and whether it is free: what every outlet counts."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._used = self._freed = 0

    def has_room(self) -> bool:
        return self._used - self._freed < self._num_slots

    def take(self) -> int:
        """Return the number of the next slot, which is free."""
        assert self.has_room()
        self._used += 1
        return (self._used - 1) % self._num_slots

    def freed(self, total: int) -> None:
        if not self._freed <= total <= self._used:
            raise ProtocolError(f"Decode gave back {total} slots of its ring, but had {self._used} and {self._freed}.")
        self._freed = total


class Slots:
    """The slots of an inlet over `memory`, in turn."""

    def __init__(self, memory: memoryview, *, num_slots: int, slot_bytes: int) -> None:
        self._memory = memory
        self._num_slots = num_slots
        self._slot_bytes = slot_bytes
        self._count = 0

    def payload(self, num_bytes: int) -> memoryview:
        if num_bytes > self._slot_bytes:
            raise ProtocolError(f"Prefill placed {num_bytes} bytes, but a slot of the ring has {self._slot_bytes}.")
        offset = self._count % self._num_slots * self._slot_bytes
        return self._memory[offset : offset + num_bytes]

    def advance(self) -> int:
        self._count += 1
        return self._count

    def close(self) -> None:
        """Let go of the memory."""
        self._memory = memoryview(b"")


def choose(ours: Sequence[str], theirs: Sequence[str]) -> str | None:
    """Return the first of our media that the peer has as well."""
    return next((name for name in ours if name in theirs), None)
