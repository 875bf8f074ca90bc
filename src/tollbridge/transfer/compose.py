"""From a chunk of a session to a frame: header and views of the cache, no copy."""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_64

from tollbridge.transfer.base import KVMemory
from tollbridge.transfer.frames import Codec, Header, Kind, encode_header
from tollbridge.transfer.session import Chunk, SendSession


def compose(session: SendSession, chunk: Chunk, memory: KVMemory, incarnation: int) -> list[memoryview]:
    """Return the buffers of the DATA frame for `chunk`: the header, then views that alias the cache."""
    assert session.opening is not None
    views = memory.views(chunk.layer, session.table, chunk.first_token, chunk.num_tokens)
    checksum = xxh3_64()
    update = checksum.update
    for view in views:
        update(view)
    header = Header(
        kind=Kind.DATA,
        codec=Codec.NONE,
        transfer=session.transfer,
        incarnation=incarnation,
        epoch=session.opening.epoch,
        layer=chunk.layer,
        first_token=chunk.first_token,
        num_tokens=chunk.num_tokens,
        payload_bytes=chunk.num_tokens * memory.token_bytes,
        payload_checksum=checksum.intdigest(),
    )
    return [memoryview(encode_header(header)), *views]


def require_table(memory: KVMemory, block_table: Sequence[int], end_token: int, layer: int | None = None) -> None:
    """Raise ValueError unless `block_table` covers tokens [0, end_token) with blocks that exist, and `layer` does.

    Checked in the engine's thread, where the mistake was made, so that an I/O thread never meets it.
    """
    if len(block_table) * memory.block_size < end_token:
        raise ValueError(f"A table of {len(block_table)} blocks does not cover {end_token} tokens.")
    if block_table and not 0 <= min(block_table) <= max(block_table) < memory.num_blocks:
        raise ValueError(f"The block table names a block outside 0..{memory.num_blocks - 1}.")
    if layer is not None and not 0 <= layer < memory.num_layers:
        raise ValueError(f"Layer {layer} is not within 0..{memory.num_layers - 1}.")
