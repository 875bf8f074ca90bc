"""The sending half of a connection: whole frames, gathered from where they lie, resumed where the kernel stopped.

Control frames go before the next DATA frame, never inside one. DATA frames are staged first (`push`), in the order in
which they leave. The memory of a frame is borrowed from the cache at most until its last byte is with the kernel;
`release` and `settle` give it back early, from any thread: `_lock` is held whenever the blocks are read or the frames
change hands, and never while a callback runs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from tollbridge.transfer.channel import Channel
from tollbridge.transfer.frames import Header, encode_header
from tollbridge.transfer.stage import Parcel

IOV_MAX = 1024  # buffers per system call (limits.h)


class OutgoingFrame:
    """A DATA frame: its header, which lacks the checksum, and the parcel with the payload."""

    def __init__(self, header: Header, parcel: Parcel) -> None:
        self.transfer = header.transfer
        self.parcel = parcel
        self._header = header

    def load(self) -> list[memoryview]:
        """Return the bytes of the frame."""
        checksum, payload = self.parcel.load()
        return [memoryview(encode_header(self._header._replace(payload_checksum=checksum))), *payload]


class FrameWriter:
    """See the top of the file.

    `fill` is asked to push a frame when one is needed, and with True to push those that will be needed next, while the
    kernel is full. `frame_sent` hears when one is with the kernel.
    """

    def __init__(
        self,
        fill: Callable[[bool], None] = lambda ahead: None,
        frame_sent: Callable[[bytes], None] = lambda transfer: None,
    ) -> None:
        self._fill = fill
        self._frame_sent = frame_sent
        self._lock = threading.Lock()
        self._control: deque[bytes] = deque()
        self._control_bytes = 0
        self._staged: deque[OutgoingFrame] = deque()
        self._buffers: list[memoryview] = []  # what is left of the current frame, or of control frames
        self._left_bytes = 0  # in them
        self._frame: OutgoingFrame | None = None  # the current one, None: control
        self._closed = False

    @property
    def pending(self) -> bool:
        """Whether bytes wait for the kernel."""
        return bool(self._buffers or self._control or self._staged)

    @property
    def num_staged(self) -> int:
        """Frames that wait behind the current one."""
        return len(self._staged)

    @property
    def backlog_bytes(self) -> int:
        """Control bytes that wait."""
        return self._control_bytes

    def queue(self, frame: bytes) -> None:
        """Queue a whole control frame."""
        self._control.append(frame)
        self._control_bytes += len(frame)

    def push(self, frame: OutgoingFrame) -> None:
        """Stage a DATA frame behind those that wait."""
        with self._lock:
            if not self._closed:
                self._staged.append(frame)
                return
        frame.parcel.close()

    def release(self, transfer: bytes) -> None:
        """Read the blocks of `transfer` no more: its current frame goes on from a copy, its staged ones are dropped."""
        with self._lock:
            self._settle_current(transfer)
            for frame in self._staged_of(transfer):
                self._staged.remove(frame)
                frame.parcel.close()

    def settle(self, transfer: bytes) -> None:
        """Read the blocks of `transfer` no more, and send all that was staged of them all the same."""
        with self._lock:
            self._settle_current(transfer)
            for frame in self._staged_of(transfer):
                frame.parcel.settle(None)

    def close(self) -> None:
        """Drop everything: the connection is gone."""
        with self._lock:
            self._closed = True
            frames = [*self._staged, *([self._frame] if self._frame is not None else [])]
            self._staged.clear()
            self._buffers, self._frame = [], None
            for frame in frames:
                frame.parcel.close()

    def write(self, channel: Channel, budget_bytes: int) -> int:
        """Send until the kernel is full, nothing is left, or `budget_bytes` are spent; return the bytes sent.

        Raises OSError when the connection is gone.
        """
        total, is_full = 0, False
        while total < budget_bytes and self._load():
            with self._lock:
                try:
                    sent = channel.sendmsg(self._buffers[:IOV_MAX])
                except BlockingIOError:
                    is_full = True
                    break
                finished = self._advance(sent)
            total += sent
            if finished is not None:
                self._frame_sent(finished.transfer)
        if is_full and self._frame is not None:
            self._fill(True)
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
            return True
        self._fill(False)
        with self._lock:
            if not self._staged:
                return False
            self._frame = self._staged.popleft()
            self._buffers = self._frame.load()
            self._left_bytes = sum(map(len, self._buffers))
            return True

    def _advance(self, sent: int) -> OutgoingFrame | None:
        """Drop the `sent` bytes from the front of what is current; return the DATA frame that this finished."""
        self._left_bytes -= sent
        if self._left_bytes:
            self._buffers = drop_front(self._buffers, sent)
            return None
        self._buffers = []
        finished, self._frame = self._frame, None
        if finished is not None:
            finished.parcel.close()
        return finished

    def _settle_current(self, transfer: bytes) -> None:
        if self._frame is not None and self._frame.transfer == transfer and self._buffers:
            self._buffers = self._frame.parcel.settle(self._buffers)

    def _staged_of(self, transfer: bytes) -> list[OutgoingFrame]:
        return [frame for frame in self._staged if frame.transfer == transfer]


def drop_front(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return `buffers` (of bytes) without their first `num_bytes`, which must be fewer than they have."""
    for index, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [buffer[num_bytes:], *buffers[index + 1 :]]
        num_bytes -= len(buffer)
    raise AssertionError("more bytes were dropped than there are")
