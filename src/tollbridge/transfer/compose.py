"""From a chunk of a session to a frame: the header, and the parcel with the payload."""

from __future__ import annotations

from collections.abc import Sequence

from tollbridge.transfer.base import KVMemory, LoadRequest
from tollbridge.transfer.frames import Codec, Header, Kind
from tollbridge.transfer.session import Chunk, SendSession
from tollbridge.transfer.stage import Span, Stage
from tollbridge.transfer.writer import OutgoingFrame


def compose(
    session: SendSession, chunk: Chunk, stage: Stage, incarnation: int, *, codec: Codec = Codec.NONE
) -> OutgoingFrame:
    """Return the DATA frame for `chunk`, lifted from the cache; `stage` must have room."""
    assert session.opening is not None
    parcel = stage.lift(Span(chunk.layer, session.table, chunk.first_token, chunk.num_tokens, chunk.num_layers))
    header = Header(
        kind=Kind.DATA,
        codec=codec,
        transfer=session.transfer,
        incarnation=incarnation,
        epoch=session.opening.epoch,
        layer=chunk.layer,
        num_layers=chunk.num_layers,
        first_token=chunk.first_token,
        num_tokens=chunk.num_tokens,
        payload_bytes=parcel.num_bytes,
        payload_checksum=0,  # known when the payload is loaded
    )
    return OutgoingFrame(header, parcel)


def require_table(memory: KVMemory, block_table: Sequence[int], end_token: int, layer: int | None = None) -> None:
    """Raise ValueError unless `block_table` covers tokens [0, end_token) with blocks that exist, and `layer` does.

    Checked in the engine's thread, where the mistake was made, so that an I/O thread never meets it.
    """
    if len(block_table) * memory.block_size < end_token:
        raise ValueError(f"A table of {len(block_table)} blocks does not cover {end_token} tokens.")
    if block_table and not 0 <= min(block_table) <= max(block_table) < memory.num_blocks:
        raise ValueError(f"The block table names a block outside 0..{memory.num_blocks - 1}.")
    require_layer(memory, layer)


def require_layer(memory: KVMemory, layer: int | None) -> None:
    """Raise ValueError unless there is such a layer; None stands for all."""
    if layer is not None and not 0 <= layer < memory.num_layers:
        raise ValueError(f"Layer {layer} is not within 0..{memory.num_layers - 1}.")


def require_load(memory: KVMemory, load: LoadRequest) -> None:
    """Raise ValueError unless `load` begins with a granule and its table covers it."""
    require_table(memory, load.block_table, load.first_token + load.num_tokens)
    if load.first_token % memory.granule:
        raise ValueError(f"Token {load.first_token} does not begin a granule of {memory.granule} tokens.")
