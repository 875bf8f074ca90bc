from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tollbridge.engine import attention
from tollbridge.engine.attention import (
    STEP,
    DecodeGroup,
    build_step,
    paged_attention,
)
from tollbridge.engine.cache import KVShape, PagedKVCache
from tollbridge.errors import UnsupportedError
from tollbridge.sched.plan import SequenceChunk, StepPlan

BLOCK_SIZE = 4
KV_HEADS, GROUP, DIM = 2, 3, 8
HEADS = KV_HEADS * GROUP
LAYER = SimpleNamespace(layer_idx=1)
IN_PLACE = 64  # tokens; less than the default, so that small contexts are read in place too


@pytest.fixture(scope="module", autouse=True)
def short_contexts_in_place():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MIN_TOKENS_IN_PLACE", IN_PLACE)
        yield


def make_cache() -> PagedKVCache:
    shape = KVShape(num_layers=2, block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.float32)
    cache = PagedKVCache(shape, num_blocks=400, device=torch.device("cpu"))
    cache.tensor.fill_(float("nan"))
    return cache


def naive(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: int, scale: float) -> torch.Tensor:
    """`[n, HEADS, DIM]` over `[first + n, KV_HEADS, DIM]`, one query at a time."""
    key, value = key.repeat_interleave(GROUP, 1), value.repeat_interleave(GROUP, 1)
    out = torch.empty_like(query)
    for row in range(len(query)):
        seen = first + row + 1
        weights = (torch.einsum("thd,hd->ht", key[:seen], query[row]) * scale).softmax(1)
        out[row] = torch.einsum("ht,thd->hd", weights, value[:seen])
    return out


def run_mix(mix: list[tuple[int, int]], seed: int, *, scattered: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to chunks (first_token, num_new); return what came out and what should: `[num_tokens, HEADS, DIM]`."""
    torch.manual_seed(seed)
    cache = make_cache()
    free = list(range(cache.num_blocks))
    if scattered:
        random.Random(seed).shuffle(free)
    chunks, queries, keys, values, want = [], [], [], [], []
    for first, new in mix:
        total = first + new
        table = [free.pop(0) for _ in range(-(-total // BLOCK_SIZE))]
        chunks.append(
            SequenceChunk(request_id="", token_ids=[0] * new, first_token=first, block_table=table, needs_logits=False)
        )
        q, k, v = torch.randn(new, HEADS, DIM), torch.randn(total, KV_HEADS, DIM), torch.randn(total, KV_HEADS, DIM)
        slots = torch.tensor([table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(total)])
        cache.write(1, slots[:first], k[:first], v[:first])
        queries.append(q), keys.append(k[first:]), values.append(v[first:])
        want.append(naive(q, k, v, first, 0.3))
    step = build_step(StepPlan(chunks=chunks), cache, lambda layer: None)
    stacked = [torch.cat(parts).transpose(0, 1).unsqueeze(0) for parts in (queries, keys, values)]
    out, weights = paged_attention(LAYER, *stacked, None, scaling=0.3, **{STEP: step})
    assert weights is None
    return out[0], torch.cat(want)


chunk_shapes = st.tuples(st.integers(0, 30), st.integers(1, 9)) | st.tuples(st.integers(0, 150), st.just(1))


@settings(max_examples=30, deadline=None)
@given(mix=st.lists(chunk_shapes, min_size=1, max_size=8), seed=st.integers(0, 1000), scattered=st.booleans())
def test_any_mix_is_what_it_should_be(mix: list[tuple[int, int]], seed: int, scattered: bool) -> None:
    got, want = run_mix(mix, seed, scattered=scattered)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def plan_of(*shapes: tuple[int, int, list[int]]) -> StepPlan:
    return StepPlan(
        chunks=[
            SequenceChunk(request_id="", token_ids=[0] * new, first_token=first, block_table=table, needs_logits=True)
            for first, new, table in shapes
        ]
    )


def test_decodes_are_grouped_by_length() -> None:
    shapes = [(first, 1, list(range(0, 100, 2))) for first in (3, 5, 6, 100, 120, 7)]
    step = build_step(plan_of(*shapes), make_cache(), lambda layer: None)
    sizes = sorted((group.keys.num_rows, group.keys.num_tokens) for group in step.groups)
    assert sizes == [(1, 8), (2, 121), (3, 7)]
    for group in step.groups:
        assert isinstance(group, DecodeGroup)
        assert group.keys.num_rows == len(group.rows)


def test_a_long_run_is_read_in_place() -> None:
    run = list(range(60))
    step = build_step(plan_of((IN_PLACE, 1, run), (40, 8, run)), make_cache(), lambda layer: None)
    assert all(group.keys.slots is None for group in step.groups)
    memory = step.cache.layers[0]
    key, _ = step.groups[0].keys.read(memory)
    assert key.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()


def test_a_short_table_is_an_error() -> None:
    with pytest.raises(IndexError, match="does not cover 9 tokens"):
        build_step(plan_of((8, 1, [0, 1])), make_cache(), lambda layer: None)


def test_layer_is_reported_after_its_kv_is_there() -> None:
    cache = make_cache()
    seen: list[tuple[int, bool]] = []
    plan = plan_of((0, 3, [5]))
    step = build_step(
        plan, cache, lambda layer: seen.append((layer, bool(cache.layers[layer][20:23].isfinite().all())))
    )
    query, key = torch.randn(1, HEADS, 3, DIM), torch.randn(1, KV_HEADS, 3, DIM)
    paged_attention(LAYER, query, key, key, None, **{STEP: step})
    assert seen == [(1, True)]
    assert step.num_layers_done == 1
    assert cache.layers[0].isnan().all()


@pytest.mark.parametrize(
    ("argument", "feature"), [("sliding_window", "sliding"), ("softcap", "soft-capping"), ("s_aux", "sinks")]
)
def test_arguments_that_change_the_result_are_refused(argument: str, feature: str) -> None:
    step = build_step(plan_of((0, 1, [0])), make_cache(), lambda layer: None)
    query, key = torch.randn(1, HEADS, 1, DIM), torch.randn(1, KV_HEADS, 1, DIM)
    with pytest.raises(UnsupportedError, match=feature):
        paged_attention(LAYER, query, key, key, None, **{STEP: step, argument: 128})
