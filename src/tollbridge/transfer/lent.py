"""The memory that an I/O process is given (outboard.py): the cache itself, or a ring beside it.

Both say what the other process has to be handed (`fds`) and told (`layout`).
"""

from __future__ import annotations

import socket

from tollbridge.transfer.base import KVMemory
from tollbridge.transfer.copies import CopyDesk
from tollbridge.transfer.memory import HostMemory
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.orders import Pipe
from tollbridge.transfer.shared import DeviceLayout, Layout, SharedBuffer
from tollbridge.transfer.stage import Fence
from tollbridge.transfer.staging import DeviceMemory


class LentCache:
    """KV in host memory, which the I/O process maps."""

    def __init__(self, memory: HostMemory) -> None:
        assert memory.shared_fd is not None
        self.fds: tuple[int, ...] = (memory.shared_fd,)
        self.layout: Layout | DeviceLayout = Layout.of(memory)

    def passed_on(self) -> None:
        """Nothing is ours."""

    def hold(self, fence: Fence) -> None:
        """Nothing is issued: what the CPU did is done."""

    def close(self) -> None:
        """Nothing is under way."""


class LentRing:
    """KV on a device: a ring that both processes map, and the desk that copies between the two."""

    def __init__(self, memory: DeviceMemory, options: TransferOptions, *, name: str) -> None:
        self.layout = DeviceLayout.of(memory, options)
        self._ring = SharedBuffer(self.layout.ring_bytes)
        copier = memory.copier(
            memoryview(self._ring.data), num_slots=self.layout.num_slots, slot_bytes=self.layout.slot_bytes
        )
        ours, self._theirs = socket.socketpair()
        self.fds: tuple[int, ...] = (self._ring.fd, self._theirs.fileno())
        self._desk = CopyDesk(Pipe(ours), copier, name=name)

    def passed_on(self) -> None:
        self._theirs.close()

    def hold(self, fence: Fence) -> None:
        self._desk.hold(fence)

    def close(self) -> None:
        self._desk.close()


def lend(memory: KVMemory, options: TransferOptions, *, name: str) -> LentCache | LentRing:
    """Return `memory` as an I/O process gets it; OSError when this machine cannot share it."""
    if isinstance(memory, HostMemory):
        return LentCache(memory)
    assert isinstance(memory, DeviceMemory)
    return LentRing(memory, options, name=name)
