"""Views of paged memory against indexing token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollbridge.transfer.memory import BufferMemory

LAYERS, BLOCKS, SIZE, TOKEN = 2, 12, 4, 6


def make() -> tuple[np.ndarray, BufferMemory]:
    array = np.random.default_rng(0).integers(0, 256, (LAYERS, BLOCKS * SIZE, TOKEN), dtype=np.uint8)
    memory = BufferMemory(array, num_layers=LAYERS, num_blocks=BLOCKS, block_size=SIZE, token_bytes=TOKEN)
    return array, memory


@given(st.permutations(range(BLOCKS)), st.integers(0, BLOCKS * SIZE), st.data())
def test_against_slots(table: list[int], first: int, data: st.DataObject) -> None:
    array, memory = make()
    count = data.draw(st.integers(0, BLOCKS * SIZE - first))
    layer = data.draw(st.integers(0, LAYERS - 1))
    views = memory.views(layer, table, first, count)
    slots = [table[token // SIZE] * SIZE + token % SIZE for token in range(first, first + count)]
    assert b"".join(views) == array[layer, slots].tobytes()


def test_neighbours_are_merged() -> None:
    _, memory = make()
    assert len(memory.views(1, [3, 4, 5, 9, 8, 10, 11], 2, 25)) == 4
    assert [len(view) for view in memory.views(0, list(range(BLOCKS)), 0, BLOCKS * SIZE)] == [BLOCKS * SIZE * TOKEN]


def test_views_alias_the_buffer() -> None:
    array, memory = make()
    memory.views(1, [2], 1, 1)[0][:] = b"abcdef"
    assert array[1, 2 * SIZE + 1].tobytes() == b"abcdef"


@pytest.mark.parametrize(
    ("layer", "table", "first", "count", "match"),
    [
        (2, [0], 0, 1, "layer 2"),
        (0, [0], 0, 5, "does not cover token 4"),
        (0, [0], -1, 1, "does not cover"),
        (0, [12], 0, 1, "outside"),
        (0, [-1], 0, 1, "outside"),
    ],
)
def test_impossible_views(layer: int, table: list[int], first: int, count: int, match: str) -> None:
    _, memory = make()
    with pytest.raises(ValueError, match=match):
        memory.views(layer, table, first, count)


def test_the_buffer_must_fit() -> None:
    with pytest.raises(ValueError, match="writable and have 48 bytes"):
        BufferMemory(bytes(48), num_layers=1, num_blocks=2, block_size=4, token_bytes=6)
    with pytest.raises(ValueError, match="not 47"):
        BufferMemory(bytearray(47), num_layers=1, num_blocks=2, block_size=4, token_bytes=6)
    with pytest.raises(ValueError, match="positive"):
        BufferMemory(bytearray(0), num_layers=0, num_blocks=2, block_size=4, token_bytes=6)
