"""Copies that another process asks for: KV on a GPU, moved by an I/O process that never touches the GPU.

    I/O process                                    engine's process
    RingStage over a RemoteCopier   ── Copy ──>    CopyDesk issues it on the side stream and records a fence
    its fence is behind us          <── Copied ──  that fence is behind us, and so are all before it

The ring is shared memory: pinned for the engine's process, whose device copies to and from it, and plain memory for the
sockets of the other. So books, checksums and sockets are over there, and what the engine's interpreter lock pays for a
frame is a message, two launches and an event.

Who may touch the blocks: copies are issued in the order in which they were asked for, and an end is told only once the
fences of its transfer are behind us. When the I/O process dies, `CopyDesk.close` returns when every copy that it had
asked for is done, and only then do its transfers end.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from tollbridge.transfer.orders import Copied, Copy, Pipe, copied, copies
from tollbridge.transfer.shared import DeviceLayout
from tollbridge.transfer.stage import PASSED, Fence, Span, Stage
from tollbridge.transfer.staging import Copier, RingStage

logger = logging.getLogger(__name__)


class CopyDesk:
    """The engine's side. `close` when the other process is gone."""

    def __init__(self, pipe: Pipe, copier: Copier, *, name: str) -> None:
        self._pipe = pipe
        self._copier = copier
        self._changed = threading.Condition()
        self._issued: deque[Fence] = deque()
        self._is_over = False
        self._threads = [
            threading.Thread(target=target, name=f"{name}-{what}", daemon=True)
            for target, what in ((self._issue_all, "issue"), (self._tell_all, "tell"))
        ]
        for thread in self._threads:
            thread.start()

    def hold(self, fence: Fence) -> None:
        """Let no copy that is issued from now on begin before `fence` is behind us."""
        self._copier.hold(fence)

    def close(self) -> None:
        """Return when no copy is under way and none will come; the other process has closed its end."""
        for thread in self._threads:
            thread.join()
        try:
            self._copier.close()
        except Exception:
            # only a device that has failed for good gets here: nothing of it writes any more, and ends must be told
            logger.exception("The device failed while its copies ended.")
        self._pipe.close()

    # ── the desk's threads ──

    def _issue_all(self) -> None:
        try:
            while (data := self._pipe.receive()) is not None:
                fence = self._issue(copies.decode(data))
                with self._changed:
                    self._issued.append(fence)
                    self._changed.notify()
        except Exception:
            logger.exception("The device failed: this worker's KV is not moved any more.")
            self._pipe.break_off()
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def _issue(self, order: Copy) -> Fence:
        span = Span(order.layer, order.blocks, order.first_token, order.num_tokens, order.num_layers)
        return self._copier.gather(span, order.slot) if order.out else self._copier.scatter(order.slot, span, PASSED)

    def _tell_all(self) -> None:
        total = 0
        while (fence := self._next()) is not None:
            try:
                fence.wait()
            except Exception:
                logger.exception("The device failed: this worker's KV is not moved any more.")
                self._pipe.break_off()
                return
            total += self._drop_done(fence)
            self._pipe.say(Copied(total))

    def _next(self) -> Fence | None:
        with self._changed:
            self._changed.wait_for(lambda: self._issued or self._is_over)
            return self._issued[0] if self._issued else None

    def _drop_done(self, first: Fence) -> int:
        """Drop what is done from the front, `first` at least; return how many."""
        with self._changed:
            count = 0
            while self._issued and (self._issued[0] is first or self._issued[0].done()):
                self._issued.popleft()
                count += 1
            return count


class RemoteMemory:
    """A KVMemory whose device is the other process's; made in the I/O process."""

    def __init__(self, layout: DeviceLayout, ring: memoryview, pipe: Pipe, lost: Callable[[], None]) -> None:
        self.num_layers = layout.num_layers
        self.num_blocks = layout.num_blocks
        self.block_size = layout.block_size
        self.granule = layout.granule
        self.granule_bytes = layout.granule_bytes
        self.max_frame_bytes = layout.max_frame_bytes
        self.num_streams = layout.num_streams
        self.batch_bytes = layout.batch_bytes
        self._layout = layout
        self._ring = ring
        self._pipe = pipe
        self._lost = lost

    def fence(self) -> Fence:
        """Return a fence that is behind us: the engine's process gives an order once its fence is, or holds copies."""
        return PASSED

    def stage(self, *, max_payload_bytes: int, ring_bytes: int | None) -> Stage:
        """Return the stage over the ring that was shared; once."""
        layout = self._layout
        return RingStage(
            RemoteCopier(layout, self._ring, self._pipe, self._lost),
            num_slots=layout.num_slots,
            slot_bytes=layout.slot_bytes,
            granule=layout.granule,
            granule_bytes=layout.granule_bytes,
        )


class RemoteCopier:
    """Implements `staging.Copier` by asking. `lost` is called once when nobody answers any more."""

    def __init__(self, layout: DeviceLayout, ring: memoryview, pipe: Pipe, lost: Callable[[], None]) -> None:
        size = layout.slot_bytes
        self._slots = [ring[index * size : (index + 1) * size] for index in range(layout.num_slots)]
        self._block_size = layout.block_size
        self._pipe = pipe
        self._lost = lost
        self._changed = threading.Condition()
        self._num_issued = self._num_done = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._listen, name="kv-copies", daemon=True)
        self._thread.start()

    def slot(self, index: int) -> memoryview:
        return self._slots[index]

    def gather(self, span: Span, slot: int) -> Fence:
        return self._ask(True, slot, span)

    def scatter(self, slot: int, span: Span, after: Fence) -> Fence:
        assert after is PASSED, "the desk holds copies back by itself"
        return self._ask(False, slot, span)

    def hold(self, fence: Fence) -> None:
        raise AssertionError("fences are held at the desk")

    def close(self) -> None:
        """Say no more; all copies are done. The desk closes when the process is gone."""
        self._is_closed = True
        self._slots = []

    def is_done(self, number: int) -> bool:
        return self._num_done >= number

    def wait(self, number: int) -> None:
        """Return when copy `number` is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_done >= number)

    # ── inside ──

    def _ask(self, out: bool, slot: int, span: Span) -> Fence:
        size = self._block_size
        first_block, end_block = span.first_token // size, -(-(span.first_token + span.num_tokens) // size)
        blocks = tuple(span.table[first_block:end_block])
        first_token = span.first_token - first_block * size
        self._num_issued += 1  # by one thread at a time: see Copier
        self._pipe.send(Copy(out, slot, span.layer, span.num_layers, blocks, first_token, span.num_tokens))
        return _RemoteFence(self, self._num_issued)

    def _listen(self) -> None:
        while (data := self._pipe.receive()) is not None:
            total = copied.decode(data).total
            with self._changed:
                self._num_done = total
                self._changed.notify_all()
        if not self._is_closed:
            self._lost()


class _RemoteFence:
    def __init__(self, copier: RemoteCopier, number: int) -> None:
        self._copier = copier
        self._number = number

    def done(self) -> bool:
        return self._copier.is_done(self._number)

    def wait(self) -> None:
        self._copier.wait(self._number)
