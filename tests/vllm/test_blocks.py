"""Whole blocks as the smallest piece of a KVMemory."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollbridge.transfer.base import Fingerprint, LoadRequest
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.tcp import TcpReceiver, TcpSender
from tollbridge.vllm.blocks import BlockMemory, Pieces, Region

BLOCK_BYTES = 6
NUM_BLOCKS = 5


def memory() -> tuple[BlockMemory, list[ctypes.Array[ctypes.c_char]]]:
    buffers = [ctypes.create_string_buffer(bytes([layer]) * 30, 30) for layer in range(2)]
    regions = [Region(ctypes.addressof(buffer), 30) for buffer in buffers]
    return BlockMemory(regions, num_blocks=NUM_BLOCKS, block_bytes=BLOCK_BYTES), buffers


def test_views_alias_the_layer() -> None:
    blocks, buffers = memory()
    (view,) = blocks.views(1, [0, 3], 1, 1)
    view[:] = b"abcdef"
    assert buffers[1].raw[18:24] == b"abcdef"
    assert buffers[0].raw == bytes(30)


def test_neighbours_are_merged() -> None:
    blocks, _ = memory()
    assert [view.nbytes for view in blocks.views(0, [1, 2, 4], 0, 3)] == [12, 6]


def test_a_layer_that_does_not_exist() -> None:
    blocks, _ = memory()
    with pytest.raises(ValueError, match="layer 2"):
        blocks.views(2, [0], 0, 1)


@given(st.integers(1, 64), st.integers(1, 300), st.integers(0, 300))
def test_a_block_is_ready_when_full_or_when_the_prompt_is(block_size: int, num_tokens: int, end_token: int) -> None:
    pieces = Pieces(block_size)
    ready = pieces.ready(end_token, num_tokens)
    assert ready <= pieces.covering(num_tokens) or end_token > num_tokens
    if end_token >= num_tokens:
        assert ready == pieces.covering(num_tokens)
    else:
        assert ready * block_size <= end_token


@given(st.integers(1, 64), st.integers(0, 10), st.integers(0, 300))
def test_a_span_covers_its_tokens(block_size: int, first_block: int, num_tokens: int) -> None:
    first, count = Pieces(block_size).span(first_block * block_size, num_tokens)
    assert first == first_block
    assert num_tokens <= count * block_size < num_tokens + block_size


def test_a_span_inside_a_block() -> None:
    with pytest.raises(ValueError, match="token 3"):
        Pieces(4).span(3, 1)


@pytest.mark.parametrize("media", ["tcp", "shm"])
def test_blocks_move_by_each_medium(media: str) -> None:
    """Memory that vLLM owns is sent and received as any other, with a partly filled last block whole."""
    print_ = Fingerprint(
        model="m", dtype="float32", num_layers=2, num_kv_heads=1, head_size=8, block_size=16, layout="opaque"
    )
    options, table, lacked = TransferOptions(media=media), [3, 1, 2], [0, 5, 4]
    caches = [[np.full((6, 4096), fill + layer, dtype=np.uint8) for layer in range(2)] for fill in (10, 20)]
    memories = [
        BlockMemory([Region(layer.ctypes.data, layer.nbytes) for layer in cache], num_blocks=6, block_bytes=4096)
        for cache in caches
    ]
    sender, receiver = TcpSender(memories[0], print_, options), TcpReceiver(memories[1], print_, options)
    done = threading.Event()
    receiver.set_listener(done.set)
    try:
        transfer_id, (host, port) = "ab" * 16, sender.address
        sender.register(transfer_id, digest=b"d", num_tokens=3)
        sender.publish(transfer_id, table, 3)
        receiver.open(
            LoadRequest(
                transfer_id=transfer_id,
                host=host,
                port=port,
                digest=b"d",
                first_token=0,
                num_tokens=3,
                block_table=lacked,
            )
        )
        assert done.wait(10)
        assert [(end.outcome, end.medium) for end in receiver.poll()] == [("done", media)]
        for layer, cache in enumerate(caches[1]):
            assert (cache[lacked] == 10 + layer).all() and (cache[[1, 2, 3]] == 20 + layer).all()
    finally:
        receiver.close()
        sender.close()
