"""KV memory that two processes address: an anonymous file (Linux), mapped by both, that lives as long as its users."""

from __future__ import annotations

import mmap
import os

import msgspec

from tollbridge.transfer.memory import BufferMemory, HostMemory
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.staging import DeviceMemory, ring_shape


class SharedBuffer:
    """`num_bytes` of zeros in a file without a name. `data` is writable; OSError when there is not so much memory."""

    def __init__(self, num_bytes: int) -> None:
        self.fd = os.memfd_create("tollbridge-kv")
        os.ftruncate(self.fd, num_bytes)
        self.data = mmap.mmap(self.fd, num_bytes)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)  # the mapping goes with its last view


class Layout(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The shape of bytes laid out as `BufferMemory` has them."""

    num_layers: int
    num_blocks: int
    block_size: int
    token_bytes: int
    granule: int

    @classmethod
    def of(cls, memory: HostMemory) -> Layout:
        return cls(
            num_layers=memory.num_layers,
            num_blocks=memory.num_blocks,
            block_size=memory.block_size,
            token_bytes=memory.granule_bytes // memory.granule,
            granule=memory.granule,
        )

    @property
    def num_bytes(self) -> int:
        return self.num_layers * self.num_blocks * self.block_size * self.token_bytes


class DeviceLayout(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A KV memory that its own process alone can address, and the ring of host memory that it shares."""

    num_layers: int
    num_blocks: int
    block_size: int
    granule: int
    granule_bytes: int
    max_frame_bytes: int
    num_streams: int
    batch_bytes: int
    num_slots: int
    slot_bytes: int

    @classmethod
    def of(cls, memory: DeviceMemory, options: TransferOptions) -> DeviceLayout:
        """Return the layout of `memory`, with a ring as `options` ask for it; ConfigError: too small."""
        max_frame_bytes = options.max_frame_bytes or memory.max_frame_bytes
        num_slots, slot_bytes = ring_shape(
            ring_bytes=options.ring_bytes or memory.ring_bytes,
            max_payload_bytes=max_frame_bytes,
            granule_bytes=memory.granule_bytes,
        )
        return cls(
            num_layers=memory.num_layers,
            num_blocks=memory.num_blocks,
            block_size=memory.block_size,
            granule=memory.granule,
            granule_bytes=memory.granule_bytes,
            max_frame_bytes=max_frame_bytes,
            num_streams=memory.num_streams,
            batch_bytes=memory.batch_bytes,
            num_slots=num_slots,
            slot_bytes=slot_bytes,
        )

    @property
    def ring_bytes(self) -> int:
        return self.num_slots * self.slot_bytes


def attach(fd: int, layout: Layout) -> BufferMemory:
    """Return the memory behind the file `fd` of another process."""
    return BufferMemory(mmap.mmap(fd, layout.num_bytes), **msgspec.structs.asdict(layout))
