"""A book that several I/O threads share: one at a time inside, and what takes long afterwards, outside.

Lock order. A thread inside a turn holds the book's lock and may take the lock of one connection's writer or reader (to
push a frame) or of the stage. A thread that holds one of those never enters a turn. Letting go of a transfer's blocks
waits for those locks, and on a GPU for copies, so it is not done inside: the book says `release`, and the monitor
carries it out when the turn is over, before the ledger hears of the end. So nothing waits for anything in a circle, the
book is never held for long, and the engine hears of an end when no thread touches its blocks any more.

Between the turn and the release other threads may still move bytes of that transfer; nothing new of it begins, because
it has left the book.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType

from tollbridge.transfer.base import TransferEnd
from tollbridge.transfer.ledger import Ledger
from tollbridge.transfer.wire import Wire

logger = logging.getLogger(__name__)


class Monitor:
    """See the top of the file: `with monitor:` is a turn. It is the book's Wire and Ends."""

    def __init__(self, wire: Wire, ledger: Ledger) -> None:
        self._wire = wire
        self._ledger = ledger
        self._lock = threading.Lock()
        self._releases: list[Callable[[], None]] = []  # of this turn
        self._ends: list[TransferEnd] = []

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        releases, ends = self._releases, self._ends
        if releases or ends:
            self._releases, self._ends = [], []
        self._lock.release()
        for release in releases:
            try:
                release()
            except Exception:
                # only a device that has failed for good gets here: nothing of it writes any more, and ends must be told
                logger.exception("The device failed while a transfer let go of its blocks.")
        for end in ends:
            self._ledger.end(end)

    # ── inside a turn ──

    def emit(self, connection: int, frame: bytes) -> None:
        self._wire.emit(connection, frame)

    def medium(self, connection: int) -> str:
        return self._wire.medium(connection)

    def release(self, connection: int, transfer: bytes) -> None:
        self._releases.append(partial(self._wire.release, connection, transfer))

    def settle(self, connection: int, transfer: bytes) -> None:
        self._releases.append(partial(self._wire.settle, connection, transfer))

    def end(self, end: TransferEnd) -> None:
        self._ends.append(end)

    def active(self) -> frozenset[str]:
        return self._ledger.active()
