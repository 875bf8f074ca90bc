"""The sending half of a connection: whole frames, gathered from where they lie, resumed where the kernel stopped.

Control frames go before the next DATA frame, never inside one. DATA frames are staged first (`push`), in the order in
which they leave. The memory of a frame is borrowed from the cache at most until its last byte is with the kernel;
Where payloads are placed in a ring (placed.py), only the header goes to the kernel, once the payload is there.
`release` and `settle` give it back early, from any thread: `_lock` is held whenever the blocks are read or the frames
change hands, and never while a callback runs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from tollbridge.transfer.channel import Channel
from tollbridge.transfer.frames import Header, encode_header
from tollbridge.transfer.placed import Outlet
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
        return [self.head(checksum), *payload]

    def head(self, checksum: int) -> memoryview:
        """Return the header of a payload with this checksum."""
        return memoryview(encode_header(self._header._replace(payload_checksum=checksum)))


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
        self._placed_bytes = 0  # not counted yet
        self.outlet: Outlet | None = None  # where payloads are placed; None: they go to the kernel
        self._placing: OutgoingFrame | None = None  # its payload is on the way to a slot

    @property
    def pending(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._buffers or self._control or self._staged or self._placing)

    @property
    def waits_for_ring(self) -> bool:
        """Whether what waits does not wait for the kernel, but for a slot or for a payload to arrive in one."""
        return self.outlet is not None and self.pending and not (self._buffers or self._control)

    @property
    def placing(self) -> bool:
        """Whether a payload is on its way, whose arrival nobody tells: look again soon."""
        return self._placing is not None

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
            if self.outlet is not None:
                self.outlet.close()
            frames = [*self._staged, *(frame for frame in (self._frame, self._placing) if frame is not None)]
            self._staged.clear()
            self._buffers, self._frame, self._placing = [], None, None
            for frame in frames:
                frame.parcel.close()

    def write(self, channel: Channel, budget_bytes: int) -> int:
        """Send until the kernel is full, nothing is left, or `budget_bytes` are spent; return the bytes sent or placed.

        Raises OSError when the connection is gone.
        """
        total, is_full = 0, False
        while total < budget_bytes and self._load():
            placed, self._placed_bytes = self._placed_bytes, 0
            total += placed
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
        if (is_full and self._frame is not None) or self.waits_for_ring:
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
        if self._placing is None:
            self._fill(False)
        with self._lock:
            if self.outlet is not None:
                return self._load_placed(self.outlet)
            if not self._staged:
                return False
            self._frame = self._staged.popleft()
            self._buffers = self._frame.load()
            self._left_bytes = sum(map(len, self._buffers))
            return True

    def _load_placed(self, outlet: Outlet) -> bool:
        """Make the header of the next frame current once its payload is in its slot, and the blocks free."""
        if self._placing is None:
            if not self._staged or not outlet.has_room():
                return False
            self._placing = self._staged.popleft()
            outlet.begin(self._placing.parcel)
        checksum = outlet.maybe_placed()
        if checksum is None:
            return False
        self._frame, self._placing = self._placing, None
        self._placed_bytes += self._frame.parcel.num_bytes
        self._frame.parcel.close()
        self._buffers = [self._frame.head(checksum)]
        self._left_bytes = len(self._buffers[0])
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
        if self.outlet is not None:
            if self._placing is not None and self._placing.transfer == transfer:
                self.outlet.settle()
            return  # of a frame that is placed nothing but the header is left
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
