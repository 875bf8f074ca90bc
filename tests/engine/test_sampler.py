from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import sampling
from tollbridge.engine.base import SamplingParams
from tollbridge.engine.draws import Draw
from tollbridge.engine.logprobs import token_logprobs
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
everything = st.builds(
    SamplingParams,
    max_tokens=st.just(9),
    min_tokens=st.integers(0, 6),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 7, VOCAB]),
    top_p=st.sampled_from([0.1, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    presence_penalty=st.sampled_from([0.0, -1.5, 2.0]),
    frequency_penalty=st.sampled_from([0.0, -0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.6]),
    logit_bias=st.sampled_from([(), ((3, 5.0), (9, -100.0))]),
    allowed_token_ids=st.sampled_from([(), tuple(range(0, VOCAB, 3))]),
    bad_words=st.sampled_from([(), ((5,), (3, 9), (6, 6, 6))]),
    stop_token_ids=st.sampled_from([(), (17, 18)]),
    logprobs=st.sampled_from([None, 0, 3]),
)
rows = st.tuples(st.integers(0, len(LOGITS) - 1), some_params, st.integers(0, (1 << 64) - 1), st.integers(1, 9000))


def one(params: SamplingParams, seed: int = 1, position: int = 1) -> Draw:
    return Draw(params, [0] * position, seed=seed)


def sample(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    return TokenSampler().sample(logits, draws).token_ids


def draw(*picked: tuple[int, SamplingParams, int, int]) -> list[int]:
    return sample(LOGITS[[row for row, *_ in picked]], [one(*rest) for _, *rest in picked])


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
    got = sample(logits, [one(params(temperature=0.5), 77, position) for position in range(count)])
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
    got = sample(logits, [one(params(top_k=2), 5, position) for position in range(200)])
    assert set(got) == set(range(10))


def test_a_wide_nucleus_needs_the_whole_vocabulary() -> None:
    logits = torch.zeros(300, 2000) + torch.linspace(0, 1e-3, 2000)
    got = sample(logits, [one(params(top_p=0.5), 9, position) for position in range(300)])
    assert min(got) >= 950  # the likelier half
    assert len(set(got)) > 200


def test_a_tiny_temperature_does_not_overflow() -> None:
    assert draw((0, params(temperature=2e-5), 1, 1)) == [int(LOGITS[0].argmax())]


def test_logits_that_are_not_numbers_are_an_error() -> None:
    logits = LOGITS[:3].clone()
    logits[1, 77] = float("nan")
    with pytest.raises(RuntimeError, match=r"rows \[1\] are not numbers"):
        sample(logits, [one(params(temperature=0.0))] * 3)


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((500, 9), float("-inf"))
    logits[:, [2, 5]] = 0.0
    assert set(sample(logits, [one(params(top_p=0.9), 3, position) for position in range(500)])) == {2, 5}


def test_nothing_to_draw() -> None:
    assert sample(LOGITS[:0], []) == []


def test_statistics() -> None:
    sampler = TokenSampler()
    sampler.sample(LOGITS[:3], [one(params(temperature=0.0)), one(params()), one(params())])
    assert (sampler.statistics().greedy_total, sampler.statistics().random_total) == (1, 2)


@settings(max_examples=150, deadline=None)
@given(
    params=everything,
    prompt=st.lists(st.integers(0, 20), min_size=1, max_size=9),
    num_continued=st.integers(0, 8),
    seed=st.integers(0, 1 << 63),
    data=st.data(),
)
def test_every_parameter_does_what_the_naive_reference_does(
    params: SamplingParams, prompt: list[int], num_continued: int, seed: int, data: st.DataObject
) -> None:
    """Token after token over rows of real numbers, with tokens from a small set so that they come again."""
    num_continued = min(num_continued, len(prompt) - 1)
    mine = Draw(params, prompt, seed=seed, num_continued=num_continued, end_ids=(0,))
    before, output = prompt[: len(prompt) - num_continued], prompt[len(prompt) - num_continued :]
    for step in range(4):
        row = LOGITS[data.draw(st.integers(0, len(LOGITS) - 1))]
        want = sampling.pick(row.numpy(), params, before, output, num_new=step, seed=seed, end_ids={0})
        got = TokenSampler().sample(row[None], [mine])
        assert got.token_ids == [want]
        if params.logprobs is not None:
            assert got.logprobs[0].token_ids == (want, *sampling.likeliest(row.numpy(), params.logprobs))
            expected = row.double().log_softmax(0)[list(got.logprobs[0].token_ids)]
            torch.testing.assert_close(torch.tensor(got.logprobs[0].logprobs).double(), expected, atol=1e-5, rtol=0)
        token = data.draw(st.sampled_from([want, 3, 5, 6, 9]))
        assert mine.take(token) == ""
        output.append(token)


@pytest.mark.parametrize("row", range(4))
def test_the_naive_reference_filters_as_transformers_does(row: int) -> None:
    from transformers.generation import logits_process as stock

    prompt, scores = [3, 9, 9, 200], LOGITS[row : row + 1].clone()
    penalised = stock.RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([prompt]), scores.clone())
    mine = sampling.shaped(
        scores[0].numpy(), params(repetition_penalty=1.4), prompt, [], num_new=0, end_ids=(), allowed=None
    )
    torch.testing.assert_close(torch.from_numpy(mine), penalised[0])
    for chosen, warper in (
        (params(top_k=7), stock.TopKLogitsWarper(7)),
        (params(top_p=0.7), stock.TopPLogitsWarper(0.7)),
        (params(min_p=0.1), stock.MinPLogitsWarper(0.1)),
    ):
        kept = set(warper(torch.tensor([prompt]), scores.clone())[0].isfinite().nonzero().flatten().tolist())
        drawn = {sampling.pick(scores[0].numpy(), chosen, prompt, [], seed=seed) for seed in range(400)}
        assert drawn <= kept
        assert len(kept) < 12 or len(drawn) > 5


def test_a_row_of_nothing_is_an_error_of_its_own() -> None:
    nothing = params(temperature=0.0, allowed_token_ids=(7,), logit_bias=((7, float("-inf")),))
    got = TokenSampler().sample(LOGITS[:2], [one(nothing), one(params(temperature=0.0))])
    assert list(got.errors) == [0]
    assert got.token_ids[1] == int(LOGITS[1].argmax())


def test_rows_are_picked_and_left_as_they_are() -> None:
    before = LOGITS.clone()
    draws = [one(params(temperature=0.0, logit_bias=((1, 100.0),))), one(params(temperature=0.0))]
    assert TokenSampler().sample(LOGITS, draws, rows=[5, 3]).token_ids == [1, int(LOGITS[3].argmax())]
    assert torch.equal(LOGITS, before)


def test_scores_are_log_probabilities() -> None:
    scores = TokenSampler().score(LOGITS, 4, [7, 8], 2)
    assert [score.token_ids for score in scores] == [
        (token, *LOGITS[row].topk(2).indices.tolist()) for row, token in ((4, 7), (5, 8))
    ]
    assert scores[0].rank == LOGITS[4].argsort(descending=True).tolist().index(7) + 1
    assert token_logprobs(LOGITS[0].numpy(), 3, 2 * VOCAB).token_ids[0] == 3
