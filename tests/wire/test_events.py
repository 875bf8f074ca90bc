"""KV events as the releases of vLLM write them, byte for byte what their encoders produce."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tollbridge.wire.events import ENCODER, AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, decode

STORED = BlockStored(block_hashes=[2**64 - 1, 7], parent_block_hash=5, token_ids=[1, 2, 3, 4], block_size=2)
REMOVED = BlockRemoved(block_hashes=[7], medium="GPU")


def packed(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


def test_ours() -> None:
    events = [STORED, REMOVED, AllBlocksCleared()]
    assert decode(ENCODER.encode(EventBatch(ts=2.5, events=events))) == (2.5, events, 0)


def test_maps_of_vllm_031() -> None:
    stored = {
        "type": "BlockStored", "block_hashes": [9], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 2,
        "lora_id": 1, "medium": "GPU", "lora_name": "l", "extra_keys": [["l", ["mm", 3], "salt"]], "group_idx": 0,
        "session_id": "s",
    }  # fmt: skip
    batch = decode(packed(stored, {"type": "BlockRemoved", "block_hashes": [9], "medium": "CPU", "group_idx": 0}))
    assert batch.events == [
        BlockStored(
            block_hashes=[9], parent_block_hash=None, token_ids=[1, 2], block_size=2, lora_id=1, medium="GPU",
            lora_name="l", extra_keys=[["l", ["mm", 3], "salt"]],
        ),
        BlockRemoved(block_hashes=[9], medium="CPU"),
    ]  # fmt: skip


@pytest.mark.parametrize("rest", [[], [None], [None, "GPU"], [None, "GPU", None], [None, "GPU", None, None, 0, "x", 1]])
def test_arrays_of_older_releases(rest: list[Any]) -> None:
    stored = ["BlockStored", [b"x" * 32], b"p" * 32, [1, 2], 2, *rest]
    (event,) = decode(packed(stored)).events
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.parent_block_hash, event.token_ids) == ([b"x" * 32], b"p" * 32, [1, 2])
    assert event.medium == (rest[1] if len(rest) > 1 else None)


def test_other_arrays() -> None:
    batch = decode(packed(["BlockRemoved", [7], "GPU"], ["BlockRemoved", [7]], ["AllBlocksCleared"]))
    assert batch.events == [REMOVED, BlockRemoved(block_hashes=[7]), AllBlocksCleared()]


def test_what_is_not_known_does_not_take_its_neighbours_along() -> None:
    batch = decode(packed({"type": "BlockPolished"}, ["BlockPolished"], 3, {"type": "AllBlocksCleared"}))
    assert batch == (1.5, [AllBlocksCleared()], 3)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x01", msgspec.msgpack.encode([1.5])])
def test_no_batch_at_all(payload: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(payload)
