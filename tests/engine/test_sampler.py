from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tollbridge.engine.base import SamplingParams
from tollbridge.engine.sampler import TokenSampler, uniform

VOCAB = 400
LOGITS = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(3)) * 3

some_params = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    temperature=st.sampled_from([0.0, 1e-7, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 7, VOCAB, VOCAB + 9]),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 0.999, 1.0]),
)
rows = st.tuples(st.integers(0, len(LOGITS) - 1), some_params, st.integers(0, (1 << 64) - 1), st.integers(1, 9000))


def draw(*picked: tuple[int, SamplingParams, int, int]) -> list[int]:
    where, params, seeds, positions = zip(*picked, strict=True)
    return TokenSampler().sample(LOGITS[list(where)], params, seeds, positions)


def params(**more: float) -> SamplingParams:
    return SamplingParams(max_tokens=1, **more)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(batch=st.lists(rows, min_size=1, max_size=9))
def test_a_draw_does_not_depend_on_the_batch(batch: list[tuple[int, SamplingParams, int, int]]) -> None:
    assert draw(*batch) == [draw(row)[0] for row in batch]


@settings(max_examples=60, deadline=None)
@given(row=rows)
def test_a_draw_is_within_the_filters(row: tuple[int, SamplingParams, int, int]) -> None:
    where, chosen, _, _ = row
    (token_id,) = draw(row)
    order = LOGITS[where].argsort(descending=True).tolist()
    rank = order.index(token_id)
    if chosen.temperature < 1e-5 or chosen.top_k == 1 or chosen.top_p == 0.01:
        assert rank == 0
    if chosen.top_k:
        assert rank < chosen.top_k
    if chosen.temperature >= 1e-5:
        scores = LOGITS[where].double() / chosen.temperature  # the sampler's are float32: hence the tolerance
        if 0 < chosen.top_k < VOCAB:
            scores[order[chosen.top_k :]] = float("-inf")
        likelier = scores.softmax(0)[order[:rank]].sum()
        assert likelier < chosen.top_p + 1e-6


def test_greedy_takes_the_best() -> None:
    greedy = [(row, params(temperature=0.0), 1, 1) for row in range(len(LOGITS))]
    assert draw(*greedy) == LOGITS.argmax(-1).tolist()


def test_frequencies_follow_the_probabilities() -> None:
    count = 20_000
    logits = torch.tensor([[0.0, 1.0, 2.0, -30.0]]).expand(count, 4)
    got = TokenSampler().sample(logits, [params(temperature=0.5)] * count, [77] * count, range(count))
    seen = torch.bincount(torch.tensor(got), minlength=4) / count
    torch.testing.assert_close(seen, (logits[0] / 0.5).softmax(0), atol=0.015, rtol=0)


def test_uniform_is_uniform_and_sees_every_bit_of_the_seed() -> None:
    numbers = torch.tensor([uniform(1, position) for position in range(10_000)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert torch.histc(numbers, 10, 0, 1).sub(1000).abs().max() < 150
    assert len({uniform(1 << bit, 5) for bit in range(64)}) == 64
    assert len({uniform(0, position) for position in range(1000)}) == 1000


def test_ties_at_the_border_are_kept() -> None:
    logits = torch.zeros(1, 10).expand(200, 10)
    got = TokenSampler().sample(logits, [params(top_k=2)] * 200, [5] * 200, range(200))
    assert set(got) == set(range(10))


def test_a_wide_nucleus_needs_the_whole_vocabulary() -> None:
    logits = torch.zeros(300, 2000) + torch.linspace(0, 1e-3, 2000)
    got = TokenSampler().sample(logits, [params(top_p=0.5)] * 300, [9] * 300, range(300))
    assert min(got) >= 950  # the likelier half
    assert len(set(got)) > 200


def test_a_tiny_temperature_does_not_overflow() -> None:
    assert draw((0, params(temperature=2e-5), 1, 1)) == [int(LOGITS[0].argmax())]


def test_logits_that_are_not_numbers_are_an_error() -> None:
    logits = LOGITS[:3].clone()
    logits[1, 77] = float("nan")
    with pytest.raises(RuntimeError, match=r"rows \[1\] are not numbers"):
        TokenSampler().sample(logits, [params(temperature=0.0)] * 3, [1] * 3, [1] * 3)


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((500, 9), float("-inf"))
    logits[:, [2, 5]] = 0.0
    assert set(TokenSampler().sample(logits, [params(top_p=0.9)] * 500, [3] * 500, range(500))) == {2, 5}


def test_nothing_to_draw() -> None:
    assert TokenSampler().sample(LOGITS[:0], [], [], []) == []


def test_statistics() -> None:
    sampler = TokenSampler()
    sampler.sample(LOGITS[:3], [params(temperature=0.0), params(), params()], [1] * 3, [1] * 3)
    assert (sampler.statistics().greedy_total, sampler.statistics().random_total) == (1, 2)
