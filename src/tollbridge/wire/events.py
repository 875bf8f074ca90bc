"""KV cache events in vLLM's format (vllm/distributed/kv_events.py, 0.31), so that any KV-aware router can follow us.

ZMQ PUB multipart `(topic, sequence number as 8 bytes big-endian, msgpack)`; the payload is the array
`[ts, events, dp_rank]`, each event a map with a `type` key. Older releases write an event as an array that begins with
its type; hashes are whole numbers, or bytes with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0. `decode` reads all of these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

EngineHash = int | bytes


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag="BlockStored"):
    """Full blocks entered the prefix cache. `token_ids` are those of all `block_hashes`, in order."""

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None  # what else named each block: adapter, pictures, cache salt


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag="BlockRemoved"):
    """One physical copy of each block was evicted; another copy may remain."""

    block_hashes: list[EngineHash]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, kw_only=True, tag="AllBlocksCleared"):
    """The prefix cache was dropped."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """One message on the wire."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


ENCODER = msgspec.msgpack.Encoder()
DECODER = msgspec.msgpack.Decoder(EventBatch)


class Decoded(NamedTuple):
    """A batch as it could be read."""

    ts: float
    events: list[KVEvent]
    num_unknown: int  # events of a kind, or in a form, that is not known


class _StoredArray(msgspec.Struct, frozen=True, array_like=True, tag="BlockStored"):
    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None


class _RemovedArray(msgspec.Struct, frozen=True, array_like=True, tag="BlockRemoved"):
    block_hashes: list[EngineHash]
    medium: str | None = None


class _ClearedArray(msgspec.Struct, frozen=True, array_like=True, tag="AllBlocksCleared"):
    pass


class _RawBatch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[msgspec.Raw]


_RAW = msgspec.msgpack.Decoder(_RawBatch)
_MAP = msgspec.msgpack.Decoder(KVEvent)
_ARRAY = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)


def decode(payload: bytes) -> Decoded:
    """Return the batch in `payload`, whichever release wrote it; msgspec.DecodeError when it is no batch at all."""
    batch = _RAW.decode(payload)
    events: list[KVEvent] = []
    for raw in batch.events:
        try:
            events.append(_event(bytes(raw)))
        except msgspec.DecodeError:
            continue
    return Decoded(batch.ts, events, len(batch.events) - len(events))


def _event(raw: bytes) -> KVEvent:
    if not _is_array(raw):
        return _MAP.decode(raw)
    event = _ARRAY.decode(raw)
    if isinstance(event, _StoredArray):
        return BlockStored(**msgspec.structs.asdict(event))
    if isinstance(event, _RemovedArray):
        return BlockRemoved(block_hashes=event.block_hashes, medium=event.medium)
    return AllBlocksCleared()


def _is_array(raw: bytes) -> bool:
    return 0x90 <= raw[0] <= 0x9F or raw[0] in (0xDC, 0xDD)  # msgpack: fixarray, array 16, array 32
