"""KV memory on a CUDA GPU: one tensor of bytes per layer, gathered and scattered on a side stream of high priority.

The forward pass is never waited for and never made to wait: `fence` records an event on the engine's stream, and what
it published is held back until the event has passed (gate.py), so a gather finds its KV computed. Blocks to be loaded
may still be read by kernels that were issued for their former owner: a scatter waits for the event that was
recorded when the load was opened, on the device, which costs nothing once it has passed.

Copies of a side run on one stream, so what they share needs no events of its own: the numbers of the granules, uploaded
once for all layers of a chunk, and the scratch that torch's allocator hands out again. Rows are moved as 8-byte words
where they divide, which is several times as fast as bytes, and granule by granule, so block-major and token-major
caches go the same way. Waiting releases the GIL and sleeps (`blocking=True`) rather than spin on a core.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache

import torch

from tollbridge.errors import UnsupportedError
from tollbridge.transfer.stage import Fence, Span, Stage
from tollbridge.transfer.staging import Copier, RingStage, granule_numbers, ring_shape

# Measured from GPU to GPU over loopback (claim transfer-gpu, docs/LOG.md). What is short is the GIL, of which a frame
# takes some tenths of a millisecond whatever its size: hence large frames. Four streams do with less CPU what plain
# sockets do, eight a quarter more.
NUM_STREAMS = 8
MAX_FRAME_BYTES = 8 * 1024 * 1024
RING_BYTES = 256 * 1024 * 1024  # auto: what 8 lanes have under way, one frame being sent and 3 behind it
BATCH_BYTES = 4 * 1024 * 1024
_CACHED_RANGES = 256


class CudaFence:
    """An event on a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class CudaMemory:
    """A KVMemory over `layers`, each a uint8 tensor `[num_blocks, block_bytes]` of one GPU.

    The tensors stay the engine's and must live as long as the medium. `granule` is `block_size` unless a block is
    ordered by token. Raises ValueError when the tensors do not fit together, UnsupportedError when they are not on a
    GPU.
    """

    max_frame_bytes = MAX_FRAME_BYTES
    num_streams = NUM_STREAMS
    batch_bytes = BATCH_BYTES
    ring_bytes = RING_BYTES

    def __init__(self, layers: Sequence[torch.Tensor], *, block_size: int, granule: int = 1) -> None:
        _check_layers(layers, block_size, granule)
        self.device = layers[0].device
        self.num_layers = len(layers)
        self.num_blocks, block_bytes = layers[0].shape
        self.block_size = block_size
        self.granule = granule
        self.granule_bytes = block_bytes * granule // block_size
        self._layers = [_rows(layer, self.granule_bytes) for layer in layers]

    def fence(self) -> Fence:
        """Return a fence behind all that this thread's current stream has been given."""
        return CudaFence(torch.cuda.current_stream(self.device))

    def stage(self, *, max_payload_bytes: int, ring_bytes: int | None) -> Stage:
        """Return a stage with a ring of pinned memory; ConfigError when that is too small."""
        num_slots, slot_bytes = ring_shape(
            ring_bytes=ring_bytes or self.ring_bytes,
            max_payload_bytes=max_payload_bytes,
            granule_bytes=self.granule_bytes,
        )
        ring = torch.empty((num_slots, slot_bytes), dtype=torch.uint8, pin_memory=True)
        copier = CudaCopier(self._layers, self.block_size, self.granule, ring)
        return RingStage(
            copier,
            num_slots=num_slots,
            slot_bytes=slot_bytes,
            granule=self.granule,
            granule_bytes=self.granule_bytes,
        )

    def copier(self, ring: memoryview, *, num_slots: int, slot_bytes: int) -> Copier:
        """Return what copies to and from a ring of shared memory; it is pinned from now on, and until `close`.

        OSError when the driver does not pin it.
        """
        words = torch.frombuffer(ring, dtype=torch.uint8).view(num_slots, slot_bytes)
        pinned = _Pinned(words, self.device)
        return CudaCopier(self._layers, self.block_size, self.granule, words, release=pinned.release)


class _Pinned:
    """Memory that was not allocated as pinned; OSError when the driver does not want it."""

    def __init__(self, words: torch.Tensor, device: torch.device) -> None:
        self._address = words.data_ptr()
        self._runtime = torch.cuda.cudart()
        code = int(self._runtime.cudaHostRegister(self._address, words.numel(), 0))
        if code:
            _forget_error(device)
            raise OSError(f"The ring of {words.numel()} bytes could not be pinned (CUDA error {code}).")

    def release(self) -> None:
        self._runtime.cudaHostUnregister(self._address)


def _forget_error(device: torch.device) -> None:
    """Launch something: the runtime keeps its last error, and would tell it to the next launch, the engine's."""
    with suppress(RuntimeError):
        torch.ones(1, device=device).add_(1)


class CudaCopier:
    """Implements `staging.Copier`. `layers` are matrices `[num_granules, words of a granule]`.

    `ring` is pinned memory, `[num_slots, slot_bytes]` of uint8; `release` lets go of it.
    """

    def __init__(
        self,
        layers: Sequence[torch.Tensor],
        block_size: int,
        granule: int,
        ring: torch.Tensor,
        *,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self._layers = layers
        self._device = layers[0].device
        self._block_size = block_size
        self._granule = granule
        self._stream = torch.cuda.Stream(self._device, priority=-1)
        self._threads = threading.local()  # whether this thread issues to our stream already
        self._numbers = lru_cache(maxsize=_CACHED_RANGES)(self._upload_numbers)
        self._rows = lru_cache(maxsize=_CACHED_RANGES)(self._rows_of_slot)
        self._release = release
        self._slots = [memoryview(row.numpy()) for row in ring]
        self._words = list(ring.view(layers[0].dtype))  # [num_slots][words]

    def slot(self, index: int) -> memoryview:
        return self._slots[index]

    @torch.inference_mode()  # an engine may have made its cache in it, and then nobody else may write to it
    def gather(self, span: Span, slot: int) -> Fence:
        self._enter()
        numbers = self._numbers(*_range(span, self._block_size))
        for index, layer in enumerate(span.layers):
            rows = self._layers[layer].index_select(0, numbers)
            self._rows(slot, index, len(numbers)).copy_(rows, non_blocking=True)
        return CudaFence(self._stream)

    @torch.inference_mode()
    def scatter(self, slot: int, span: Span, after: Fence) -> Fence:
        self._enter()
        self.hold(after)
        numbers = self._numbers(*_range(span, self._block_size))
        for index, layer in enumerate(span.layers):
            rows = self._rows(slot, index, len(numbers)).to(self._device, non_blocking=True)
            self._layers[layer].index_copy_(0, numbers, rows)
        return CudaFence(self._stream)

    def hold(self, fence: Fence) -> None:
        if isinstance(fence, CudaFence) and not fence.done():
            self._stream.wait_event(fence.event)

    def close(self) -> None:
        self._stream.synchronize()
        self._slots, self._words = [], []
        self._numbers.cache_clear()
        self._rows.cache_clear()
        self._release()

    def _enter(self) -> None:
        """Let this thread issue to our stream, for good: an I/O thread uses the device for nothing else."""
        if not hasattr(self._threads, "entered"):
            torch.cuda.set_stream(self._stream)
            self._threads.entered = True

    def _rows_of_slot(self, slot: int, index: int, num_rows: int) -> torch.Tensor:
        """Return the part `index` of a slot as `[num_rows, words of a granule]`."""
        num_words = self._layers[0].shape[1]
        size = num_rows * num_words
        return self._words[slot][index * size : (index + 1) * size].view(num_rows, num_words)

    def _upload_numbers(self, blocks: tuple[int, ...], first_token: int, num_tokens: int) -> torch.Tensor:
        """Return the numbers of granules on the device; `first_token` counts from the first of `blocks`."""
        span = Span(0, blocks, first_token, num_tokens)
        numbers = granule_numbers(span, block_size=self._block_size, granule=self._granule)
        return torch.from_numpy(numbers).pin_memory().to(self._device, non_blocking=True)


def _range(span: Span, block_size: int) -> tuple[tuple[int, ...], int, int]:
    """Return the blocks of a span and its place in them: the same for all layers, so that it is uploaded once."""
    first_block, end_block = span.first_token // block_size, -(-(span.first_token + span.num_tokens) // block_size)
    blocks = tuple(span.table[first_block:end_block])
    return blocks, span.first_token - first_block * block_size, span.num_tokens


def _rows(layer: torch.Tensor, granule_bytes: int) -> torch.Tensor:
    """Return `layer` as `[num_granules, words]`."""
    is_aligned = granule_bytes % 8 == 0 and layer.data_ptr() % 8 == 0
    return layer.view(-1, granule_bytes).view(torch.int64 if is_aligned else torch.uint8)


def _check_layers(layers: Sequence[torch.Tensor], block_size: int, granule: int) -> None:
    if not layers:
        raise ValueError("there must be a layer")
    if granule <= 0 or block_size % granule:
        raise ValueError(f"a granule of {granule} tokens must divide a block of {block_size}")
    first = layers[0]
    for layer in layers:
        if layer.dtype != torch.uint8 or layer.dim() != 2 or not layer.is_contiguous():
            raise ValueError("a layer must be a contiguous uint8 tensor [num_blocks, block_bytes]")
        if layer.shape != first.shape or layer.device != first.device:
            raise ValueError("all layers must have one shape and be on one device")
    if first.shape[1] * granule % block_size:
        raise ValueError(f"a block of {first.shape[1]} bytes does not divide into granules")
    if first.device.type != "cuda":
        raise UnsupportedError(f"The KV cache is on {first.device}: this memory is for CUDA GPUs.")
