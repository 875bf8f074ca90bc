"""A KVMemory behind a codec: its granules have the size that they have on the wire, and its stage converts.

So all that counts bytes (sessions, frames, pacing, checksums, completeness) counts what travels, and need not know.
A payload is encoded when its frame is about to leave, which frees the blocks, and decoded once its checksum fits.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from tollbridge.errors import ConfigError
from tollbridge.transfer.base import Fingerprint, KVMemory
from tollbridge.transfer.codec import Codec, maybe_codec
from tollbridge.transfer.memory import HostMemory
from tollbridge.transfer.stage import Fence, Landing, Parcel, Span, Stage

_MAX_PAYLOAD_BYTES = 256 * 1024  # some milliseconds of work, so that it overlaps with the wire


class CodedMemory:
    """A KVMemory over `memory`, whose bytes travel as `codec` writes them. ConfigError when the two do not fit."""

    granule = 1

    def __init__(self, memory: HostMemory, codec: Codec) -> None:
        if memory.granule != 1 or memory.granule_bytes != codec.memory_bytes:
            raise ConfigError(
                f"transfer.codec fp8 expects {codec.memory_bytes} bytes per token and layer, but this cache has "
                f"{memory.granule_bytes} per {memory.granule}: use none."
            )
        self.num_layers = memory.num_layers
        self.num_blocks = memory.num_blocks
        self.block_size = memory.block_size
        self.granule_bytes = codec.token_bytes
        self.max_frame_bytes = min(memory.max_frame_bytes, _MAX_PAYLOAD_BYTES)
        self.num_streams = memory.num_streams
        self.batch_bytes = memory.batch_bytes
        self._memory = memory
        self._codec = codec

    def fence(self) -> Fence:
        return self._memory.fence()

    def stage(self, *, max_payload_bytes: int, ring_bytes: int | None) -> Stage:
        return CodedStage(self._memory, self._codec, min(max_payload_bytes, _MAX_PAYLOAD_BYTES))


class CodedStage:
    """One encoded or not yet decoded payload per connection, in memory of its own."""

    depth = 0

    def __init__(self, memory: HostMemory, codec: Codec, max_payload_bytes: int) -> None:
        self.max_payload_bytes = max_payload_bytes
        self._memory = memory
        self._codec = codec

    def join(self) -> None:
        """Connections share nothing."""

    def leave(self) -> None:
        """See join."""

    def regions(self) -> list[memoryview]:
        return []  # what is encoded lies in memory of its own

    def has_room(self) -> bool:
        return True

    def lift(self, span: Span) -> Parcel:
        return _CodedParcel(self._codec, self._views(span), span.num_layers * span.num_tokens * self._codec.token_bytes)

    def land(self, transfer: bytes, span: Span, after: Fence) -> Landing:
        return _CodedLanding(
            self._codec, self._views(span), span.num_layers * span.num_tokens * self._codec.token_bytes
        )

    def settle(self, transfer: bytes) -> None:
        """Committed is arrived."""

    def check(self) -> None:
        """No state, no invariant."""

    def close(self) -> None:
        """Nothing to free."""

    def _views(self, span: Span) -> list[memoryview]:
        return self._memory.span_views(span)


class _CodedParcel:
    """Borrows the cache until it is encoded."""

    def __init__(self, codec: Codec, views: list[memoryview], num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._codec = codec
        self._views = views
        self._encoded: memoryview | None = None

    def load(self) -> tuple[int, list[memoryview]]:
        data = self._encode()
        return xxh3_64_intdigest(data), [data]

    def copy_to(self, target: memoryview) -> None:
        target[:] = self._encode()

    def settle(self, rest: list[memoryview] | None) -> list[memoryview]:
        self._encode()
        return rest or []  # of our own memory

    def close(self) -> None:
        self._views, self._encoded = [], None

    def _encode(self) -> memoryview:
        if self._encoded is None:
            self._encoded, self._views = self._codec.encode(self._views), []
        return self._encoded


class _CodedLanding:
    """Keeps the payload until it is known to be right: the cache sees whole, checked payloads only."""

    batch_bytes = _MAX_PAYLOAD_BYTES

    def __init__(self, codec: Codec, views: list[memoryview], num_bytes: int) -> None:
        self._data = memoryview(bytearray(num_bytes))
        self.buffers: Sequence[memoryview] = (self._data,)
        self._codec = codec
        self._views = views

    def fill(self, payload: memoryview) -> None:
        self._data[:] = payload

    def commit(self) -> None:
        self._codec.decode(self._data, self._views)

    def close(self) -> None:
        self._views = []


def coded(name: str, memory: KVMemory, fingerprint: Fingerprint) -> tuple[KVMemory, Fingerprint]:
    """Return `memory` and `fingerprint` as they are with the codec `name`; ConfigError when it does not fit them."""
    codec = maybe_codec(name, fingerprint)
    if codec is None:
        return memory, fingerprint
    if not isinstance(memory, HostMemory):
        raise ConfigError(f"transfer.codec {name} works on KV in host memory, which this cache is not: use none.")
    return CodedMemory(memory, codec), replace(fingerprint, codec=name)
