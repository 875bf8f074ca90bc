"""KV cache events in vLLM's format (vllm/distributed/kv_events.py, 0.31), so that any KV-aware router can follow us.

ZMQ PUB multipart `(topic, sequence number as 8 bytes big-endian, msgpack)`; the payload is the array
`[ts, events, dp_rank]`, each event a map with a `type` key.
"""

from __future__ import annotations

import msgspec


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag="BlockStored"):
    """Full blocks entered the prefix cache. `token_ids` are those of all `block_hashes`, in order."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag="BlockRemoved"):
    """One physical copy of each block was evicted; another copy may remain."""

    block_hashes: list[int]
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
