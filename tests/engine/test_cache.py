from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tollbridge.engine.cache import KVShape, PagedKVCache, num_blocks_for
from tollbridge.errors import UnsupportedError

NUM_BLOCKS = 12
BLOCK_SIZE = 4
LAYERS, HEADS, DIM = 3, 2, 5


def make_cache(dtype: torch.dtype = torch.bfloat16) -> PagedKVCache:
    shape = KVShape(num_layers=LAYERS, block_size=BLOCK_SIZE, num_kv_heads=HEADS, head_dim=DIM, dtype=dtype)
    return PagedKVCache(shape, num_blocks=NUM_BLOCKS, device=torch.device("cpu"))


def slots(table: list[int], num_tokens: int) -> torch.Tensor:
    return torch.tensor([table[token // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE for token in range(num_tokens)])


tables = st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=NUM_BLOCKS, unique=True)


@given(data=st.data(), table=tables, layer=st.integers(0, LAYERS - 1))
def test_views_are_the_tokens_in_order(data: st.DataObject, table: list[int], layer: int) -> None:
    cache = make_cache()
    capacity = len(table) * BLOCK_SIZE
    first = data.draw(st.integers(0, capacity))
    count = data.draw(st.integers(0, capacity - first))
    key, value = torch.randn(capacity, HEADS, DIM).bfloat16(), torch.randn(capacity, HEADS, DIM).bfloat16()
    cache.write(layer, slots(table, capacity), key, value)

    got = b"".join(bytes(view) for view in cache.views(layer, table, first, count))

    both = torch.stack((key, value), dim=1)[first : first + count]  # [count, 2, HEADS, DIM]: K then V of each token
    assert got == both.contiguous().view(torch.uint8).numpy().tobytes()
    assert len(got) == count * cache.granule_bytes


@given(table=tables)
def test_neighbouring_blocks_share_a_view(table: list[int]) -> None:
    cache = make_cache()
    breaks = sum(second != first + 1 for first, second in itertools.pairwise(table))
    views = cache.views(0, table, 0, len(table) * BLOCK_SIZE)
    assert len(views) == 1 + breaks


def test_views_alias_the_cache() -> None:
    cache = make_cache(torch.float32)
    (view,) = cache.views(1, [3, 4], 2, 4)
    assert not view.readonly
    view[:] = torch.ones(4, 2, HEADS, DIM).numpy().tobytes()
    assert cache.layers[1][14:18].eq(1).all()
    assert cache.tensor.sum() == 4 * 2 * HEADS * DIM  # and nothing else was touched


@pytest.mark.parametrize(
    ("layer", "table", "first", "count"),
    [(LAYERS, [0], 0, 1), (-1, [0], 0, 1), (0, [0], 0, 5), (0, [0], -1, 1), (0, [NUM_BLOCKS], 0, 1), (0, [-1], 0, 1)],
)
def test_ranges_outside_are_refused(layer: int, table: list[int], first: int, count: int) -> None:
    with pytest.raises(IndexError):
        make_cache().views(layer, table, first, count)


def test_only_the_blocks_of_the_range_must_exist() -> None:
    assert make_cache().views(0, [99, 2, 99], 4, 4)


def test_a_cache_elsewhere_has_no_views() -> None:
    shape = KVShape(num_layers=1, block_size=4, num_kv_heads=1, head_dim=2, dtype=torch.float16)
    cache = PagedKVCache(shape, num_blocks=1, device=torch.device("meta"))
    with pytest.raises(UnsupportedError, match="host memory"):
        cache.views(0, [0], 0, 1)


def test_sizes() -> None:
    shape = make_cache().shape
    assert shape.token_bytes == 2 * HEADS * DIM * 2
    assert shape.block_bytes == LAYERS * BLOCK_SIZE * shape.token_bytes
    assert num_blocks_for(shape, 10 * shape.block_bytes - 1) == 9
    assert make_cache().statistics().num_bytes == NUM_BLOCKS * shape.block_bytes


def test_byte_layers_are_the_cache() -> None:
    cache = make_cache()
    layers = cache.byte_layers()
    assert len(layers) == cache.num_layers
    assert all(layer.shape == (cache.num_blocks, BLOCK_SIZE * cache.granule_bytes) for layer in layers)
    layers[1][3] = 7
    (view,) = cache.views(1, [3], 0, BLOCK_SIZE)
    assert set(view) == {7}
