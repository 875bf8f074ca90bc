"""Tasks that wait for a device: each runs once its fence is behind us, in the order in which they came.

A forward pass on a GPU is issued long before it is computed, so "this layer is in memory" is true only later. The
engine's thread records a fence and goes on; the gate's thread waits for fences, one after the other, and posts what
they held back. Where memory has no such delay every fence is behind us at once, and there is no thread.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tollbridge.transfer.stage import Fence

logger = logging.getLogger(__name__)


class _Held(NamedTuple):
    key: bytes
    fence: Fence
    task: Callable[[], None]


class Gate:
    """See the top of the file. `post` hands a task on; it is called with the gate's lock held and must be quick."""

    def __init__(self, post: Callable[[Callable[[], None]], object], *, name: str) -> None:
        self._post = post
        self._name = name
        self._changed = threading.Condition()
        self._held: deque[_Held] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False

    def after(self, key: bytes, fence: Fence, task: Callable[[], None]) -> None:
        """Post `task` once `fence` is behind us and all earlier tasks were posted; never blocks."""
        with self._changed:
            if not self._held and fence.done():
                self._post(task)
                return
            if self._closed:
                return
            self._held.append(_Held(key, fence, task))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def forget(self, key: bytes) -> None:
        """Drop the tasks of `key` that wait: on return none of them will be posted any more."""
        with self._changed:
            self._held = deque(held for held in self._held if held.key != key)

    def close(self) -> None:
        """Drop what waits and join the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._held.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    # ── the gate's thread ──

    def _run(self) -> None:
        while (fence := self._next_fence()) is not None:
            try:
                fence.wait()
            except Exception:
                logger.exception("The device failed: KV that was still to be computed is not sent.")
                return
            self._open(fence)

    def _next_fence(self) -> Fence | None:
        """Return the fence to wait for next; None when the gate is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._held or self._closed)
            return None if self._closed else self._held[0].fence

    def _open(self, fence: Fence) -> None:
        """Post all whose fences are behind us."""
        with self._changed:
            while self._held and (self._held[0].fence is fence or self._held[0].fence.done()):
                self._post(self._held.popleft().task)
