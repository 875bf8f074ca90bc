"""Whole blocks as the smallest piece of a KVMemory."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
