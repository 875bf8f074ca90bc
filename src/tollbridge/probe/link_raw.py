"""Bytes through plain sockets, a thread for each, for a fixed time: what the network carries without our transfer."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from tollbridge.probe.link_wire import Rate

PIECE_BYTES = 256 * 1024
_BUCKET_S = 0.02
_SETTLED, _ENDING = 0.3, 0.95  # parts of a flow that are measured: after slow start, before the first stream ends
_SLICES = 5


class RawFlow:
    """One end of a flow over connected sockets, which it owns. A sender ends it after `seconds`, or at `stop`."""

    def __init__(self, sockets: Sequence[socket.socket], *, sends: bool, seconds: float) -> None:
        self._sockets, self._seconds = sockets, seconds
        self._buckets: Counter[int] = Counter()
        self._moved_bytes = 0
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._begun_s = 0.0
        work = self._send if sends else self._receive
        self._threads = [threading.Thread(target=self._guarded, args=(work, sock), daemon=True) for sock in sockets]
        for thread in self._threads:
            thread.start()

    def wait_moved(self, num_bytes: float, timeout_s: float) -> None:
        """Return when so much has been sent or received, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._moved_bytes >= num_bytes, timeout_s)

    def wait(self) -> Rate:
        """Return when every connection has ended, with the rate at which bytes came (a sender's is of no use)."""
        for thread in self._threads:
            thread.join(self._seconds + 30.0)
        return self._rate()

    def stop(self) -> None:
        """End it now."""
        self._stopped.set()
        for sock in self._sockets:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it has ended
        self.wait()

    # ── inside ──

    def _guarded(self, work: Callable[[socket.socket], None], sock: socket.socket) -> None:
        with sock:
            try:
                sock.settimeout(self._seconds + 10.0)
                work(sock)
            except OSError:
                return  # the peer ended it, or `stop` did; what arrived counts

    def _send(self, sock: socket.socket) -> None:
        piece = os.urandom(PIECE_BYTES)
        deadline_s = time.monotonic() + self._seconds
        while time.monotonic() < deadline_s and not self._stopped.is_set():
            sock.sendall(piece)
            self._count(len(piece))

    def _receive(self, sock: socket.socket) -> None:
        scratch = bytearray(PIECE_BYTES)
        while received := sock.recv_into(scratch):
            self._count(received)

    def _count(self, num_bytes: int) -> None:
        now_s = time.monotonic()
        with self._changed:
            self._begun_s = self._begun_s or now_s
            self._buckets[int((now_s - self._begun_s) / _BUCKET_S)] += num_bytes
            self._moved_bytes += num_bytes
            self._changed.notify_all()

    def _rate(self) -> Rate:
        first, last = int(_SETTLED * self._seconds / _BUCKET_S), int(_ENDING * self._seconds / _BUCKET_S)
        size = max(1, (last - first) // _SLICES)
        slices = [
            sum(self._buckets[first + index * size + offset] for offset in range(size)) / (size * _BUCKET_S)
            for index in range(_SLICES)
        ]
        return Rate(bytes_per_s=sum(slices) / _SLICES, low=min(slices), high=max(slices))
