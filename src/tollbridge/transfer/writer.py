"""The sending half of a connection: whole frames, gathered from where they lie, resumed where the kernel stopped.

Control frames go before the next DATA frame, never inside one. The memory of a DATA frame is borrowed from the cache
until its last byte is with the kernel; `detach` gives it back early by copying what is left of that one frame.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tollbridge.transfer.channel import Channel
from tollbridge.transfer.frames import NO_TRANSFER

IOV_MAX = 1024  # buffers per system call (limits.h)


class OutgoingFrame(NamedTuple):
    """A DATA frame: its transfer, header and payload as buffers, and their size."""

    transfer: bytes
    buffers: list[memoryview]
    num_bytes: int


class FrameWriter:
    """See the top of the file. `next_frame` supplies DATA, `frame_sent` hears when one is with the kernel."""

    def __init__(
        self,
        next_frame: Callable[[], OutgoingFrame | None] = lambda: None,
        frame_sent: Callable[[bytes], None] = lambda transfer: None,
    ) -> None:
        self._next_frame = next_frame
        self._frame_sent = frame_sent
        self._control: deque[bytes] = deque()
        self._control_bytes = 0
        self._buffers: list[memoryview] = []  # what is left of the current frame
        self._left_bytes = 0  # in them
        self._transfer = NO_TRANSFER  # whose frame that is

    @property
    def pending(self) -> bool:
        """Whether bytes wait for the kernel."""
        return bool(self._buffers or self._control)

    @property
    def backlog_bytes(self) -> int:
        """Control bytes that wait."""
        return self._control_bytes

    def queue(self, frame: bytes) -> None:
        """Queue a whole control frame."""
        self._control.append(frame)
        self._control_bytes += len(frame)

    def detach(self, transfer: bytes) -> None:
        """Stop borrowing the memory of `transfer`: the rest of its current frame, if any, is copied."""
        if self._transfer == transfer and self._buffers:
            self._buffers = [memoryview(b"".join(self._buffers))]

    def write(self, channel: Channel, budget_bytes: int) -> int:
        """Send until the kernel is full, nothing is left, or `budget_bytes` are spent; return the bytes sent.

        Raises OSError when the connection is gone.
        """
        total = 0
        while total < budget_bytes and self._load():
            try:
                sent = channel.sendmsg(self._buffers[:IOV_MAX])
            except BlockingIOError:
                break
            total += sent
            self._advance(sent)
        return total

    def _load(self) -> bool:
        """Make the next frame current unless one is; return whether there is one."""
        if self._buffers:
            return True
        if self._control:
            self._buffers = [memoryview(frame) for frame in self._control]
            self._left_bytes = self._control_bytes
            self._control.clear()
            self._control_bytes = 0
            self._transfer = NO_TRANSFER
            return True
        frame = self._next_frame()
        if frame is None:
            return False
        self._transfer, self._buffers, self._left_bytes = frame
        return True

    def _advance(self, sent: int) -> None:
        """Drop the `sent` bytes from the front of the current frame."""
        self._left_bytes -= sent
        if self._left_bytes == 0:
            self._buffers = []
            if self._transfer != NO_TRANSFER:
                self._frame_sent(self._transfer)
                self._transfer = NO_TRANSFER
            return
        self._buffers = drop_front(self._buffers, sent)


def drop_front(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return `buffers` (of bytes) without their first `num_bytes`, which must be fewer than they have."""
    for index, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [buffer[num_bytes:], *buffers[index + 1 :]]
        num_bytes -= len(buffer)
    raise AssertionError("more bytes were dropped than there are")
