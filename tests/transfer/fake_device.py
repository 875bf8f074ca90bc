"""A device with memory of its own and copies that run in a thread, for what staging promises: no GPU needed.

Copies and fences are done in the order in which they were issued, later. `hold` stops the device between two of them,
`held_up` says that somebody waits for it meanwhile.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from tollbridge.transfer.stage import Fence, Span, Stage
from tollbridge.transfer.staging import RingStage, granule_numbers, ring_shape


class FakeFence:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.passed = threading.Event()

    def done(self) -> bool:
        return self.passed.is_set()

    def wait(self) -> None:
        if self._device.is_held and not self.passed.is_set():
            self._device.held_up.set()
        assert self.passed.wait(60), "the device never got there"


class FakeDevice:
    """One queue, one thread."""

    def __init__(self) -> None:
        self.held_up = threading.Event()
        self.backlog = threading.Event()  # a copy was issued while the device is held
        self.num_copies = 0  # done
        self._hold_at: int | None = None
        self._changed = threading.Condition()
        self._work: deque[tuple[Callable[[], None], FakeFence, bool]] = deque()
        self.is_held = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="fake-device", daemon=True)
        self._thread.start()

    def issue(self, work: Callable[[], None] = lambda: None) -> FakeFence:
        """Have `work` done; return the fence behind it."""
        return self._enqueue(work, is_copy=False)

    def copy(self, work: Callable[[], None]) -> FakeFence:
        return self._enqueue(work, is_copy=True)

    def _enqueue(self, work: Callable[[], None], *, is_copy: bool) -> FakeFence:
        fence = FakeFence(self)
        with self._changed:
            self._work.append((work, fence, is_copy))
            if self.is_held and is_copy:
                self.backlog.set()
            self._changed.notify_all()
        return fence

    def hold(self) -> None:
        """Do nothing more, until `resume`."""
        with self._changed:
            self.is_held = True
            self.held_up.clear()

    def hold_after(self, num_copies: int) -> None:
        """Hold the device when it has made so many copies more."""
        with self._changed:
            self.held_up.clear()
            self.backlog.clear()
            self._hold_at = self.num_copies + num_copies

    def resume(self) -> None:
        with self._changed:
            self.is_held = False
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed, self.is_held = True, False
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: (self._work and not self.is_held) or self._closed)
                if not self._work:
                    return
                work, fence, is_copy = self._work.popleft()
                work()  # inside, so that `hold` returns between two of them
                self.num_copies += is_copy
                if self.num_copies == self._hold_at:
                    self._hold_at, self.is_held = None, True
                    if any(is_copy for _, _, is_copy in self._work):
                        self.backlog.set()
            fence.passed.set()


class DeviceMemory:
    """A KVMemory of a FakeDevice over an array of bytes `[num_layers, num_blocks, block_bytes]`."""

    num_streams = 1
    max_frame_bytes = 2 << 20
    batch_bytes = 0
    ring_bytes = 64 << 20

    def __init__(self, array: np.ndarray, device: FakeDevice, *, block_size: int, granule: int) -> None:
        self.num_layers, self.num_blocks, block_bytes = array.shape
        self.block_size = block_size
        self.granule = granule
        self.granule_bytes = block_bytes * granule // block_size
        self.device = device
        self._array = array

    def fence(self) -> Fence:
        return self.device.issue()

    def stage(self, *, max_payload_bytes: int, ring_bytes: int | None) -> Stage:
        num_slots, slot_bytes = ring_shape(
            ring_bytes=ring_bytes or self.ring_bytes,
            max_payload_bytes=max_payload_bytes,
            granule_bytes=self.granule_bytes,
        )
        return RingStage(
            self.copier(memoryview(bytearray(num_slots * slot_bytes)), num_slots=num_slots, slot_bytes=slot_bytes),
            num_slots=num_slots,
            slot_bytes=slot_bytes,
            granule=self.granule,
            granule_bytes=self.granule_bytes,
        )

    def copier(self, ring: memoryview, *, num_slots: int, slot_bytes: int) -> FakeCopier:
        rows = self._array.reshape(self.num_layers, -1, self.granule_bytes)
        return FakeCopier(self, rows, np.frombuffer(ring, dtype=np.uint8).reshape(num_slots, slot_bytes))


class FakeCopier:
    """Touches the blocks when the device gets there, as a GPU would: too late for whoever took them away too early."""

    def __init__(self, memory: DeviceMemory, rows: np.ndarray, ring: np.ndarray) -> None:
        self._memory = memory
        self._rows = rows  # [num_layers, num_granules, granule_bytes]
        self._ring = ring  # [num_slots, slot_bytes]

    def slot(self, index: int) -> memoryview:
        return memoryview(self._ring[index])

    def gather(self, span: Span, slot: int) -> Fence:
        layers, numbers = self._layers(span), self._numbers(span)

        def copy() -> None:
            found = layers[:, numbers].reshape(-1)
            self._ring[slot][: found.size] = found

        return self._memory.device.copy(copy)

    def scatter(self, slot: int, span: Span, after: Fence) -> Fence:
        layers, numbers = self._layers(span), self._numbers(span)

        def copy() -> None:
            assert after.done()  # one queue: what was issued before is done
            size = len(layers) * numbers.size * layers.shape[2]
            layers[:, numbers] = self._ring[slot][:size].reshape(len(layers), numbers.size, -1)

        return self._memory.device.copy(copy)

    def hold(self, fence: Fence) -> None:
        """One queue: what was issued before is done before."""

    def close(self) -> None:
        """Nothing to free."""

    def _layers(self, span: Span) -> np.ndarray:
        if span.layers.stop > len(self._rows):
            raise IndexError(f"there is no layer {span.layers.stop - 1}")
        return self._rows[span.layer : span.layers.stop]

    def _numbers(self, span: Span) -> np.ndarray:
        return granule_numbers(span, block_size=self._memory.block_size, granule=self._memory.granule)
