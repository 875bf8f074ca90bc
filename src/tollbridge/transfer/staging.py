"""The stage of memory that the CPU cannot address: a ring of pinned host memory, and copies that run by themselves.

    send:     blocks --gather--> slot --(fence)--> checksum, socket
    receive:  socket, checksum --> slot --scatter--> blocks --(fence)--> the slot is free, the transfer may end

A slot holds one frame. `Copier` issues the copies and returns fences; it is all that knows the device (cuda.py), so
what is here runs in tests against a copier of host memory. Copies are issued in turns of the monitor and are done in
that order, by the device, while the I/O threads do something else: a lane stages the frames behind the one it sends.

The ring is all the host memory that a side uses, whatever the concurrency. When it is full nothing is lifted: what
may leave is remembered by the watermarks of the sessions, and the blocks keep it. On the receive side the socket is not
read, and TCP holds the peer back. Slots come back when frames are sent, or when scatters are done, so neither waits for
the other; a lane may hold ahead only its share of the ring, so a peer that reads slowly does not take it all.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64

from tollbridge.errors import ConfigError
from tollbridge.transfer.base import KVMemory
from tollbridge.transfer.rows import join, part
from tollbridge.transfer.stage import Fence, Landing, Parcel, Span

_MAX_DEPTH = 3  # frames ahead: enough to keep a copy engine and a socket busy at once
_MIN_SLOTS = 4
_PAGE_BYTES = 4096


class Copier(Protocol):
    """Copies between paged device memory and slots of pinned host memory, one after the other, without waiting.

    Used by one thread at a time. A fence is behind us when its copy is done, and all that were issued before it.
    """

    def slot(self, index: int) -> memoryview:
        """Return the bytes of a slot."""
        ...

    def gather(self, span: Span, slot: int) -> Fence:
        """Copy the granules of `span` into a slot, one behind the other, and so the layers."""
        ...

    def scatter(self, slot: int, span: Span, after: Fence) -> Fence:
        """Copy a slot to the granules of `span`, once `after` is behind us."""
        ...

    def hold(self, fence: Fence) -> None:
        """Let no copy that is issued from now on begin before `fence` is behind us. Any thread."""
        ...

    def close(self) -> None:
        """Free the slots; all copies are done."""
        ...


@runtime_checkable
class DeviceMemory(KVMemory, Protocol):
    """A KVMemory which copies to and from a ring, that another process may have made (copies.py)."""

    ring_bytes: int  # of a ring, when the options name no number

    def copier(self, ring: memoryview, *, num_slots: int, slot_bytes: int) -> Copier:
        """Return what copies to and from `ring`, which must be writable and lives as long."""
        ...


class RingStage:
    """See the top of the file. A Stage; its lock is the last in the lock order."""

    def __init__(self, copier: Copier, *, num_slots: int, slot_bytes: int, granule: int, granule_bytes: int) -> None:
        self.max_payload_bytes = slot_bytes
        self._copier = copier
        self._num_slots = num_slots
        self._granule = granule
        self._granule_bytes = granule_bytes
        self._lock = threading.Lock()
        self._free: deque[int] = deque(range(num_slots))
        self._landed: deque[tuple[Fence, int]] = deque()  # scatters under way, oldest first, and their slots
        self._last: dict[bytes, Fence] = {}  # the latest scatter of each transfer
        self._num_lent = 0  # slots of parcels, and of landings that are being filled
        self._num_users = 0

    # ── Stage ──

    @property
    def depth(self) -> int:
        share = self._num_slots // max(1, self._num_users)
        return max(1, min(_MAX_DEPTH, share - 1))  # one more is being sent

    def join(self) -> None:
        with self._lock:
            self._num_users += 1

    def leave(self) -> None:
        with self._lock:
            self._num_users -= 1

    def regions(self) -> list[memoryview]:
        return [self._copier.slot(index) for index in range(self._num_slots)]

    def has_room(self) -> bool:
        with self._lock:
            self._reclaim()
            return bool(self._free)

    def lift(self, span: Span) -> Parcel:
        slot = self._take()
        try:
            fence = self._copier.gather(span, slot)
        except BaseException:
            self.give_back(slot)
            raise
        return _RingParcel(self, slot, self._copier.slot(slot)[: self._num_bytes(span)], fence)

    def land(self, transfer: bytes, span: Span, after: Fence) -> Landing:
        slot = self._take()
        return _RingLanding(self, transfer, span, after, slot, self._copier.slot(slot)[: self._num_bytes(span)])

    def settle(self, transfer: bytes) -> None:
        with self._lock:
            fence = self._last.pop(transfer, None)
        if fence is not None:
            fence.wait()

    def check(self) -> None:
        """Raise AssertionError when a slot is lost or used twice."""
        with self._lock:
            slots = [*self._free, *(slot for _, slot in self._landed)]
            assert len(slots) == len(set(slots)), "a slot is free twice"
            assert len(slots) + self._num_lent == self._num_slots, "a slot is lost"

    def close(self) -> None:
        """Wait for the copies and free the ring. All connections are closed."""
        with self._lock:
            landed = list(self._landed)
        for fence, _ in landed:
            fence.wait()
        with self._lock:
            self._reclaim()
        self._copier.close()

    # ── parcels and landings ──

    def give_back(self, slot: int) -> None:
        """Take a slot back that nothing uses."""
        with self._lock:
            self._free.append(slot)
            self._num_lent -= 1

    def scatter(self, transfer: bytes, slot: int, span: Span, after: Fence) -> None:
        """Bring a slot to its blocks; it comes back by itself."""
        fence = self._copier.scatter(slot, span, after)
        with self._lock:
            self._last[transfer] = fence
            self._landed.append((fence, slot))
            self._num_lent -= 1

    # ── inside ──

    def _take(self) -> int:
        with self._lock:
            self._num_lent += 1
            return self._free.popleft()

    def _reclaim(self) -> None:
        while self._landed and self._landed[0][0].done():
            self._free.append(self._landed.popleft()[1])

    def _num_bytes(self, span: Span) -> int:
        return span.num_layers * -(-span.num_tokens // self._granule) * self._granule_bytes


class _RingParcel:
    """A frame's payload in a slot, or on its way there."""

    def __init__(self, stage: RingStage, slot: int, payload: memoryview, fence: Fence) -> None:
        self.num_bytes = len(payload)
        self._stage = stage
        self._slot: int | None = slot
        self._payload = payload
        self._fence = fence

    def load(self) -> tuple[int, list[memoryview]]:
        self._fence.wait()
        checksum = xxh3_64()
        checksum.update(self._payload)
        return checksum.intdigest(), [self._payload]

    def copy_to(self, target: memoryview) -> None:
        self._fence.wait()
        join([self._payload], target)

    def settle(self, rest: list[memoryview] | None) -> list[memoryview]:
        self._fence.wait()
        return rest or []  # it lies in the slot, which stays ours

    def close(self) -> None:
        if self._slot is not None:
            slot, self._slot = self._slot, None
            self._fence.wait()
            self._stage.give_back(slot)


class _RingLanding:
    """A slot that a socket fills."""

    batch_bytes = 1024 * 1024  # from GPU to GPU the GIL is what is short, and every batch takes it twice

    def __init__(
        self, stage: RingStage, transfer: bytes, span: Span, after: Fence, slot: int, payload: memoryview
    ) -> None:
        self.buffers: Sequence[memoryview] = (payload,)
        self._stage = stage
        self._transfer = transfer
        self._span = span
        self._after = after
        self._slot: int | None = slot

    def fill(self, payload: memoryview) -> None:
        part(payload, self.buffers)

    def commit(self) -> None:
        assert self._slot is not None
        slot, self._slot = self._slot, None
        self._stage.scatter(self._transfer, slot, self._span, self._after)

    def close(self) -> None:
        if self._slot is not None:
            slot, self._slot = self._slot, None
            self._stage.give_back(slot)


def ring_shape(*, ring_bytes: int, max_payload_bytes: int, granule_bytes: int) -> tuple[int, int]:
    """Return (number of slots, bytes of a slot) of a ring; ConfigError when it cannot hold a few frames."""
    slot_bytes = -(-max(max_payload_bytes, granule_bytes) // _PAGE_BYTES) * _PAGE_BYTES
    num_slots = ring_bytes // slot_bytes
    if num_slots < _MIN_SLOTS:
        raise ConfigError(
            f"A ring of {ring_bytes / 2**20:.3g} MiB holds {num_slots} frames of {slot_bytes} bytes, and needs "
            f"{_MIN_SLOTS}: raise transfer.ring_mib, or leave it at auto."
        )
    return num_slots, slot_bytes


def granule_numbers(span: Span, *, block_size: int, granule: int) -> npt.NDArray[np.int64]:
    """Return where the granules of `span` lie, counted in granules from the beginning of the layer."""
    per_block = block_size // granule
    first, end = span.first_token // granule, -(-(span.first_token + span.num_tokens) // granule)
    numbers = np.arange(first, end)
    first_block = first // per_block
    blocks = np.array(span.table[first_block : (end - 1) // per_block + 1], dtype=np.int64)
    return blocks[numbers // per_block - first_block] * per_block + numbers % per_block
