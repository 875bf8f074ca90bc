"""Decode steps padded to classes compute what the plain runner does, whatever the padding; on a CPU without graphs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.engine.driver import Bench, generate, make_bench
from tollbridge.engine.fixed import MIN_BLOCKS, FixedDecoder
from tollbridge.engine.runner import ModelRunner
from tollbridge.sched.plan import SequenceChunk, StepPlan

LENGTHS = [1, 15, 16, 17, 100, 250, 3]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(8)
    return [[rng.randrange(3, 512) for _ in range(length)] for length in LENGTHS]


def make_fixed(folder: Path, *, block_size: int = 16, max_rows: int = 64) -> tuple[Bench, FixedDecoder]:
    bench = make_bench(folder, block_size=block_size, num_blocks=4096 // block_size)
    decoder = FixedDecoder(bench.model, bench.cache, max_rows=max_rows)
    bench.runner = ModelRunner(bench.model, bench.cache, decoder=decoder)
    return bench, decoder


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("block_size", [1, 16])
def test_tokens_are_those_of_the_plain_runner(family_dirs, prompts, family: str, block_size: int) -> None:
    want = generate(make_bench(family_dirs[family]), prompts, 12)
    bench, decoder = make_fixed(family_dirs[family], block_size=block_size)
    for count in (1, 3, len(prompts)):  # the cache is full of NaN, so padding that is read would show
        bench.cache.tensor.fill_(float("nan"))
        assert generate(bench, prompts[:count], 12) == want[:count]
    assert decoder.statistics().steps_total > 30
    if block_size == 16:
        assert decoder.statistics().classes_total == 4  # 1, 4 and 8 rows; of the last, a second class of length


def test_classes_grow_with_the_context_and_end_at_the_cache(tiny_model_dir: Path) -> None:
    bench, decoder = make_fixed(tiny_model_dir, block_size=8)
    table = tuple(range(300))
    for position in (0, MIN_BLOCKS * 8 - 1, MIN_BLOCKS * 8, 300 * 8 - 1):
        bench.cache.tensor.zero_()
        chunk = SequenceChunk(request_id="r", token_ids=[5], first_token=position, block_table=table, needs_logits=True)
        plan = StepPlan(chunks=[chunk])
        got = bench.runner.run(plan, lambda layer: None).clone()
        want = ModelRunner(bench.model, bench.cache).run(plan, lambda layer: None)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert decoder.statistics().classes_total == 3


def test_other_steps_are_left_to_the_plain_runner(tiny_model_dir: Path) -> None:
    _, decoder = make_fixed(tiny_model_dir, max_rows=2)

    def one(*token_ids: int, needs_logits: bool = True) -> SequenceChunk:
        return SequenceChunk(
            request_id="r", token_ids=token_ids, first_token=0, block_table=(1,), needs_logits=needs_logits
        )

    assert decoder.takes([one(1), one(2)])
    assert not decoder.takes([one(1), one(2), one(3)])
    assert not decoder.takes([one(1), one(2, 3)])
    assert not decoder.takes([one(1, needs_logits=False)])


def test_layers_are_reported_once_each(tiny_model_dir: Path) -> None:
    bench, _ = make_fixed(tiny_model_dir)
    seen: list[int] = []
    chunk = SequenceChunk(request_id="r", token_ids=[5], first_token=0, block_table=(1,), needs_logits=True)
    bench.runner.run(StepPlan(chunks=[chunk]), seen.append)
    assert seen == list(range(bench.model.num_layers))
