"""The seam between the books (which decide) and a medium (which moves bytes)."""

from __future__ import annotations

from typing import Protocol


class Wire(Protocol):
    """What a book asks of its medium. Connections are numbered by the medium."""

    def emit(self, connection: int, frame: bytes) -> None:
        """Queue a whole control frame; dropped when the connection is gone."""
        ...

    def release(self, connection: int, transfer: bytes) -> None:
        """Stop touching the blocks of `transfer` before returning, in the middle of a frame if need be."""
        ...
