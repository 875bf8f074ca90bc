from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.driver import Bench, make_bench
from tollbridge.errors import UnsupportedError
from tollbridge.sched.plan import SequenceChunk, StepPlan


@pytest.fixture(scope="module")
def bench(tiny_model_dir: Path) -> Bench:
    return make_bench(tiny_model_dir)


def chunk(token_ids: list[int], *, first: int = 0, table: tuple[int, ...] = (9, 4, 6), logits: bool = True):
    return SequenceChunk(request_id="r", token_ids=token_ids, first_token=first, block_table=table, needs_logits=logits)


def run(bench: Bench, *chunks: SequenceChunk, on_layer=lambda layer: None) -> torch.Tensor:
    return bench.runner.run(StepPlan(chunks=chunks), on_layer)


def test_logits_come_in_plan_order_for_those_who_need_them(bench: Bench) -> None:
    first, second, third = chunk([5, 6, 7], table=(1,)), chunk([8, 9], table=(2,), logits=False), chunk([3], table=(3,))
    logits = run(bench, first, second, third)
    assert logits.shape == (2, bench.model.vocab_size)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits[0], run(bench, first)[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[1], run(bench, third)[0], atol=1e-4, rtol=1e-4)


def test_a_plan_may_need_no_logits(bench: Bench) -> None:
    assert run(bench, chunk([5, 6, 7], logits=False)).shape == (0, bench.model.vocab_size)


def test_layers_are_reported_in_order_when_readable(tiny_model_dir: Path) -> None:
    bench = make_bench(tiny_model_dir)
    seen = []

    def on_layer(layer: int) -> None:
        views = [bench.cache.views(each, (9, 4), 0, 20) for each in range(bench.cache.num_layers)]
        there = [all(bytes(view) != nan[: len(view)] for view in each) for each in views]
        seen.append((layer, there))

    nan = torch.full((20 * bench.cache.granule_bytes // 4,), float("nan")).numpy().tobytes()
    run(bench, chunk(list(range(20)), table=(9, 4)), on_layer=on_layer)
    layers = range(bench.model.num_layers)
    assert seen == [(layer, [each <= layer for each in layers]) for layer in layers]


def test_only_the_slots_of_the_plan_are_written(tiny_model_dir: Path) -> None:
    bench = make_bench(tiny_model_dir)
    run(bench, chunk(list(range(20)), table=(9, 4)))
    written = bench.cache.tensor.isfinite().all(dim=(0, 2, 3, 4))
    assert written.nonzero().flatten().tolist() == [*range(4 * 16, 4 * 16 + 4), *range(9 * 16, 10 * 16)]


def test_kv_shipped_as_bytes_continues_alike(bench: Bench, tiny_model_dir: Path) -> None:
    """What a transfer does, by hand: the bytes of one cache, written into other blocks of another."""
    prompt, table, there = list(range(100, 140)), (9, 4, 6), (0, 1, 7)
    other = make_bench(tiny_model_dir)
    run(bench, chunk(prompt[:-1], table=table))
    for layer in range(bench.cache.num_layers):
        data = b"".join(bytes(view) for view in bench.cache.views(layer, table, 0, 39))
        for view in other.cache.views(layer, there, 0, 39):
            view[:], data = data[: len(view)], data[len(view) :]
    want = run(bench, chunk(prompt[-1:], first=39, table=table))
    got = run(other, chunk(prompt[-1:], first=39, table=there))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_an_exception_in_a_plan_leaves_the_runner_usable(bench: Bench) -> None:
    with pytest.raises(IndexError):
        run(bench, chunk([1], first=400))
    with pytest.raises(IndexError):
        run(bench, chunk([10_000]))
    assert run(bench, chunk([5])).isfinite().all()


def test_an_empty_plan_is_an_error(bench: Bench) -> None:
    with pytest.raises(ValueError, match="must have a chunk"):
        run(bench)


def test_a_model_that_skips_attention_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.runner, "num_layers", 5)
    with pytest.raises(UnsupportedError, match="ran attention 4 times in 5 layers"):
        run(bench, chunk([5]))


def test_warm_up_leaves_no_trace(tiny_model_dir: Path) -> None:
    bench = make_bench(tiny_model_dir)
    bench.cache.tensor.zero_()
    bench.runner.warm_up()
    assert not bench.cache.tensor.any()


def test_bfloat16(tiny_model_dir: Path) -> None:
    bench = make_bench(tiny_model_dir, dtype="bfloat16")
    logits = run(bench, chunk(list(range(3, 30))), chunk([4], table=(1,)))
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()
    assert bench.cache.granule_bytes == 2 * 2 * 16 * 2


def test_statistics(tiny_model_dir: Path) -> None:
    bench = make_bench(tiny_model_dir)
    before = bench.runner.statistics()
    run(bench, chunk([5, 6, 7]), chunk([8], table=(1,)))
    after = bench.runner.statistics()
    assert after.steps_total - before.steps_total == 1
    assert after.tokens_total - before.tokens_total == 4
