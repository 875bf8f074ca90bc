"""The seam between the books (which decide) and a medium (which moves bytes)."""

from __future__ import annotations

from typing import Protocol

from tollbridge.transfer.base import TransferEnd


class Wire(Protocol):
    """What a book asks of its medium. Connections are numbered by the medium."""

    def emit(self, connection: int, frame: bytes) -> None:
        """Queue a whole control frame; dropped when the connection is gone."""
        ...

    def medium(self, connection: int) -> str:
        """Return what carries the payloads of a connection."""
        ...

    def release(self, connection: int, transfer: bytes) -> None:
        """Stop touching the blocks of `transfer`, in the middle of a frame if need be: it ended here.

        Carried out after the book has returned and before the ledger hears of the end (monitor.py).
        """
        ...

    def settle(self, connection: int, transfer: bytes) -> None:
        """Stop touching the blocks of `transfer`, and send what was taken from it all the same: it goes on."""
        ...


class Ends(Protocol):
    """Who a book tells of ends: the ledger, by way of the monitor where several threads share the book."""

    def end(self, end: TransferEnd) -> None:
        """Record the end of an active transfer."""
        ...

    def active(self) -> frozenset[str]:
        """Return the ids that have begun and not ended."""
        ...
