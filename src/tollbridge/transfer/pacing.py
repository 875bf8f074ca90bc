"""How fast and in what pieces to send: observed goodput, frame size, bandwidth cap. Pure; the caller brings the time.

A frame, once begun, must be finished (framing has to stay intact), so its size bounds how long a cancelled transfer
keeps the wire and how long a control message or a short transfer waits behind a long one. Small frames cost CPU. The
compromise is a share of a second of observed goodput, between two fixed sizes.
"""

from __future__ import annotations

from tollbridge.transfer.frames import MAX_PAYLOAD_BYTES
from tollbridge.transfer.options import TransferOptions

_WINDOW_S = 0.02
_WINDOW_BYTES = 1024 * 1024  # a fast link need not wait 20 ms for its first measurement
_WEIGHT = 0.5  # of the newest window
_MAX_UNSENT_BYTES = 4 * 1024 * 1024  # enough to ride out a millisecond away from the CPU at 25 Gb/s
_MIN_BYTES = 4096
_FIRST_FRAMES = 4  # the first frame is so many times the smallest one


class GoodputMeter:
    """Estimates bytes/s of one connection from windows in which it always had something to send."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0  # 0: nothing measured yet
        self._window_start_s: float | None = None
        self._window_bytes = 0

    def sent(self, num_bytes: int, now_s: float) -> bool:
        """Count bytes which the kernel took; return whether the estimate changed."""
        if self._window_start_s is None:
            self._window_start_s = now_s
        self._window_bytes += num_bytes
        elapsed_s = now_s - self._window_start_s
        if elapsed_s <= 0 or (elapsed_s < _WINDOW_S and self._window_bytes < _WINDOW_BYTES):
            return False
        self._update(self._window_bytes / elapsed_s)
        self._window_start_s, self._window_bytes = now_s, 0
        return True

    def idle(self) -> None:
        """Drop the window: the time until there is something to send again is not the link's."""
        self._window_start_s, self._window_bytes = None, 0

    def _update(self, rate: float) -> None:
        if self.bytes_per_s == 0.0:
            self.bytes_per_s = rate
        else:
            self.bytes_per_s += _WEIGHT * (rate - self.bytes_per_s)


class FrameSizer:
    """Chooses the size of the next frame; grows at most twofold per measurement, shrinks at once.

    The slow growth is for the first window: the kernel's buffer swallows it at memory speed, whatever the link.
    """

    def __init__(self, options: TransferOptions) -> None:
        self._options = options
        num_lanes = options.streams or 1
        self._min_bytes = max(_MIN_BYTES, options.min_frame_bytes // num_lanes)  # each lane has a frame under way
        first_bytes = max(options.min_frame_bytes, _FIRST_FRAMES * options.min_frame_bytes // num_lanes)
        self.frame_bytes = self._clamp(first_bytes)
        self.unsent_bytes = self.frame_bytes  # what the kernel may hold unsent; a power of two times the first value

    def update(self, goodput_bytes_per_s: float) -> None:
        """Take a new estimate of the link."""
        wanted = goodput_bytes_per_s * self._options.frame_s
        self.frame_bytes = self._clamp(min(wanted, 2 * self.frame_bytes))
        if wanted >= 2 * self.unsent_bytes and self.unsent_bytes < _MAX_UNSENT_BYTES:
            self.unsent_bytes *= 2
        elif wanted < self.unsent_bytes and self.unsent_bytes > self._min_bytes:
            self.unsent_bytes //= 2

    def _clamp(self, size: float) -> int:
        cap = self._options.bandwidth_cap_bytes_per_s
        if cap is not None:
            size = min(size, cap * self._options.frame_s)
        return int(min(max(size, self._min_bytes), self._options.max_frame_bytes or MAX_PAYLOAD_BYTES))


class TokenBucket:
    """A bandwidth cap: a frame may start while the balance is not negative, and then pays for all its bytes."""

    def __init__(self, bytes_per_s: float | None, now_s: float) -> None:
        self._rate = bytes_per_s
        self._balance = 0.0
        self._then_s = now_s

    def take(self, num_bytes: int, now_s: float) -> None:
        """Pay for `num_bytes` that leave now."""
        if self._rate is not None:
            self._refill(now_s)
            self._balance -= num_bytes

    def wait_s(self, now_s: float) -> float:
        """Return how long nothing may be sent; 0 when something may."""
        if self._rate is None:
            return 0.0
        self._refill(now_s)
        return -self._balance / self._rate if self._balance < -1.0 else 0.0  # less than a byte is rounding

    def _refill(self, now_s: float) -> None:
        assert self._rate is not None
        burst = self._rate * 0.01  # a pause earns at most 10 ms of credit
        self._balance = min(self._balance + (now_s - self._then_s) * self._rate, burst)
        self._then_s = now_s
