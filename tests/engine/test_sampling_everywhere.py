"""Every sampling feature: local equals split equals a naive reference, also with a preemption at every step boundary
on both sides, and while another transfer is pending; and an answer that another worker goes on with is the same answer.

The model is a hash of the KV it reads, the sampler is the real one, the reference knows neither blocks nor batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from tests.engine.fakes import (
    EOS,
    VOCAB_SIZE,
    Answer,
    FakeStream,
    HashSampler,
    Worker,
    fingerprint,
    hash_logits,
    kv_after,
    make_memory,
    prompt_of,
)
from tests.engine.test_core_split import Network, TcpNetwork
from tests.support import sampling
from tollbridge.engine.base import SamplingParams, Structure, TokenLogprobs
from tollbridge.engine.draws import Mask
from tollbridge.transfer.loopback import LoopbackNetwork
from tollbridge.wire.params import Role, TransferParams

PROMPT = [*prompt_of(13), *range(0, 20, 3)]  # some of the tokens that are likely
MAX_TOKENS = 12
STRUCTURE = Structure("regex", "every third")

FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "presence": {"presence_penalty": 1.9},
    "frequency": {"frequency_penalty": 1.5},
    "rewarded": {"frequency_penalty": -1.0, "temperature": 0.0},
    "repetition": {"repetition_penalty": 1.8},
    "bias": {"logit_bias": ((3, 4.0), (EOS, -100.0))},
    "allowed": {"allowed_token_ids": (1, 2, 5, 8, 13)},
    "bad_words": {"bad_words": ((3,), (5, 1), (1, 1)), "allowed_token_ids": (1, 3, 5)},
    "min_tokens": {"min_tokens": 7, "logit_bias": ((EOS, 6.0),)},
    "ignore_eos": {"ignore_eos": True, "logit_bias": ((EOS, 4.0),)},
    "stop_token_ids": {"stop_token_ids": (1, 2, 3, 4), "min_tokens": 2},
    "stop": {"stop": ("1", "7 ")},
    "structure": {"structure": STRUCTURE, "min_tokens": 3},
    "logprobs": {"logprobs": 2, "presence_penalty": 1.0},
    "all": {
        "temperature": 1.3,
        "top_k": 12,
        "top_p": 0.95,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.2,
        "logit_bias": ((4, 2.0),),
        "min_tokens": 5,
        "bad_words": ((4, 4),),
        "structure": STRUCTURE,
        "logprobs": 1,
    },
}


def params_of(feature: str) -> SamplingParams:
    return SamplingParams(**{"max_tokens": MAX_TOKENS, "seed": 11, **FEATURES[feature]})


def allowed_after(output: Sequence[int]) -> set[int]:
    """A toy structure: the n-th token is n modulo three; the end may come after six."""
    some = {token for token in range(VOCAB_SIZE) if token % 3 == len(output) % 3 and token != EOS}
    return some | ({EOS} if len(output) >= 6 else set())


class ToyMatcher:
    def __init__(self) -> None:
        self.output: list[int] = []

    def maybe_allowed(self) -> Mask:
        mask = np.zeros(VOCAB_SIZE, dtype=np.bool_)
        mask[list(allowed_after(self.output))] = True
        return mask

    def take(self, token_id: int) -> str:
        fits = token_id in allowed_after(self.output)
        self.output.append(token_id)
        return "" if fits else f"Token {token_id} does not fit."


class ToyStructures:
    def start(self, structure: Structure) -> ToyMatcher:
        assert structure == STRUCTURE
        return ToyMatcher()


@dataclass(frozen=True)
class Said:
    token_ids: list[int]
    text: str
    finish: tuple[str | None, int | str | None]
    logprobs: list[TokenLogprobs]

    @staticmethod
    def of(answer: Answer) -> Said:
        last = answer.wait()
        assert not last.error
        logprobs = [one for output in answer.outputs for one in output.logprobs]
        return Said(answer.token_ids, answer.text, (last.finish_reason, last.stop_reason), logprobs)


def reference(prompt: list[int], params: SamplingParams) -> Said:
    output: list[int] = []
    stream, text, logprobs = FakeStream(prompt, params), "", []
    finish: tuple[str | None, int | str | None] = (None, None)
    while finish == (None, None):
        logits = hash_logits(kv_after([*prompt, *output]))
        allowed = allowed_after(output) if params.structure else None
        token = sampling.pick(logits, params, prompt, output, seed=11, end_ids={EOS}, allowed=allowed)
        if params.logprobs is not None:
            logprobs.append(scored(logits, token, params.logprobs, allowed))
        output.append(token)
        if token == EOS and not params.ignore_eos:
            finish = "stop", None
        elif token in params.stop_token_ids:
            finish = "stop", token
        else:
            piece, stop = stream.push(token, may_stop=len(output) > params.min_tokens)
            text += piece
            finish = ("stop", stop) if stop else ("length", None) if len(output) == params.max_tokens else finish
    return Said(output, text if isinstance(finish[1], str) else text + stream.finish(), finish, logprobs)


def scored(logits: Any, token: int, num_top: int, allowed: set[int] | None = None) -> TokenLogprobs:
    row = logits.astype(np.float64)
    if allowed is not None:
        row[[one for one in range(VOCAB_SIZE) if one not in allowed]] = -np.inf
    row -= row.max()
    row -= np.log(np.exp(row).sum())
    ids = (token, *sampling.likeliest(row, num_top))
    return TokenLogprobs(ids, tuple(row[list(ids)].tolist()), int((row >= row[token]).sum()))


def assert_same(got: Said, want: Said) -> None:
    assert replace(got, logprobs=[]) == replace(want, logprobs=[])
    assert len(got.logprobs) == len(want.logprobs)
    for mine, theirs in zip(got.logprobs, want.logprobs, strict=True):
        assert (mine.token_ids, mine.rank) == (theirs.token_ids, theirs.rank)
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-4)


def preempt(worker: Worker, when: Callable[[int], bool] = lambda step: True) -> None:
    """Take the blocks of everything that runs, in front of each step that `when` names."""
    scheduler, steps = worker.engine._loop._scheduler, iter(range(1_000_000))
    original = scheduler.schedule

    def schedule() -> Any:
        if when(next(steps)):
            for sequence in list(scheduler._running):
                scheduler._preempt(sequence)
        return original()

    scheduler.schedule = schedule  # type: ignore[method-assign]


def make_worker(**more: Any) -> Worker:
    return Worker(sampler=HashSampler(), structures=ToyStructures(), **more)


class Pair:
    """A prefill and a decode worker."""

    def __init__(self, network: Network) -> None:
        memories = make_memory(64), make_memory(64)
        self.sender = network.sender(memories[0], fingerprint())
        self.prefill = make_worker(memory=memories[0], sender=self.sender, max_num_batched_tokens=8)
        self.decode = make_worker(memory=memories[1], receiver=network.receiver(memories[1], fingerprint()))
        self._count = 0

    def legs(self) -> tuple[Callable[..., Answer], Callable[..., Answer]]:
        """Return what sends the prefill leg and the decode leg of one split."""
        self._count += 1
        name = f"{self._count:032x}"
        return (
            lambda prompt, **more: self.prefill.submit(
                prompt, **{**more, "max_tokens": 1, "min_tokens": 0, "transfer": self._params("prefill", name)}
            ),
            lambda prompt, **more: self.decode.submit(prompt, **more, transfer=self._params("decode", name)),
        )

    def _params(self, role: Role, name: str) -> TransferParams:
        host, port = self.sender.address
        return TransferParams(v=1, transfer_id=name, role=role, host=host, port=port, expires=2e9)

    def close(self) -> None:
        for worker in (self.decode, self.prefill):
            worker.engine.check()
            worker.engine.shutdown()
            worker.assert_empty()


@pytest.fixture(params=[LoopbackNetwork, TcpNetwork], ids=["loopback", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param())
    yield pair
    pair.close()


def asked(feature: str) -> dict[str, Any]:
    return {"max_tokens": MAX_TOKENS, "seed": 11, "ignore_eos": False, **FEATURES[feature]}


@pytest.mark.parametrize("preempted", [False, True], ids=["undisturbed", "preempted"])
def test_local(preempted: bool) -> None:
    wanted = {feature: reference(PROMPT, params_of(feature)) for feature in FEATURES}
    with make_worker(num_blocks=256, max_num_seqs=32) as worker:
        if preempted:
            preempt(worker)
        answers = {feature: worker.submit(PROMPT, **asked(feature)) for feature in FEATURES}  # one batch of all
        while any(not answer.outputs or answer.outputs[-1].finish_reason is None for answer in answers.values()):
            worker.engine.check()
        for feature, answer in answers.items():
            assert_same(Said.of(answer), wanted[feature])
        worker.engine.check()
        assert (worker.engine.statistics().preemptions_total > 40) is preempted


@pytest.mark.parametrize("preempted", [False, True], ids=["undisturbed", "preempted"])
def test_split(pair: Pair, preempted: bool) -> None:
    """With preemption a local request is parked beside, and its prefill leg comes when all others are done."""
    if preempted:
        preempt(pair.prefill)
        preempt(pair.decode)
    late_prefill, late_decode = pair.legs()
    late = late_decode(PROMPT[3:], **asked("all"))
    for feature in FEATURES:
        prefill, decode = pair.legs()
        prompt = [*PROMPT, *range(list(FEATURES).index(feature))]  # no prefix cache makes the load needless
        answers = prefill(prompt, **asked(feature)), decode(prompt, **asked(feature))
        answers[0].wait()
        assert_same(Said.of(answers[1]), reference(prompt, params_of(feature)))
        report = answers[1].last.report
        assert report is not None
        assert report.loaded_tokens > 0 or feature != "greedy"
    late_prefill(PROMPT[3:], **asked("all")).wait()
    assert_same(Said.of(late), reference(PROMPT[3:], params_of("all")))
    if preempted:
        assert pair.prefill.engine.statistics().preemptions_total > 0
        assert pair.decode.engine.statistics().preemptions_total > 40


@pytest.mark.parametrize("feature", FEATURES)
def test_another_worker_goes_on_with_an_answer(feature: str) -> None:
    """From each place where it may have broken off; the tokens already sent count as output, not as prompt."""
    whole = reference(PROMPT, params_of(feature))
    with make_worker(num_blocks=256) as worker:
        for cut in range(1, len(whole.token_ids)):
            rest = asked(feature) | {"max_tokens": MAX_TOKENS - cut}
            rest["min_tokens"] = max(rest.get("min_tokens", 0) - cut, 0)
            answer = worker.submit([*PROMPT, *whole.token_ids[:cut]], num_continued_tokens=cut, **rest)
            got = Said.of(answer)
            if feature != "stop":  # its text may begin in what was sent: the router's seam takes care of that
                assert (got.token_ids, got.finish) == (whole.token_ids[cut:], whole.finish)
            assert len(got.logprobs) == len(whole.logprobs[cut:])


@pytest.mark.parametrize("budget", [5, 32])
@pytest.mark.parametrize("preempted_at", [None, 0, 1, 2, 3, 4, 5, 6, 7])
def test_prompt_logprobs(budget: int, preempted_at: int | None) -> None:
    """Whole although the prompt is in the prefix cache, computed in chunks, and preempted at each boundary."""
    want = [None, *(scored(hash_logits(kv_after(PROMPT[:end])), PROMPT[end], 2) for end in range(1, len(PROMPT)))]
    with make_worker(max_num_batched_tokens=budget) as worker:
        worker.submit(PROMPT).wait()
        preempt(worker, lambda step: step == preempted_at)
        answer = worker.submit(PROMPT, prompt_logprobs=2, max_tokens=3, temperature=0.0)
        beside = worker.submit(PROMPT, prompt_logprobs=0, max_tokens=1)
        tokens = Said.of(answer).token_ids
        assert tokens == reference(PROMPT, SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)).token_ids
        told = [output.prompt_logprobs for output in answer.outputs]
        assert told[0] is not None
        assert told[1:] == [None, None]
        assert_same(Said([], "", (None, None), list(told[0][1:])), Said([], "", (None, None), want[1:]))
        assert told[0][0] is None
        beside.wait()
        assert len(beside.outputs[0].prompt_logprobs or ()) == len(PROMPT)


def test_prompt_logprobs_of_a_single_token() -> None:
    with make_worker() as worker:
        answer = worker.submit([5], prompt_logprobs=1, max_tokens=2)
        answer.wait()
        assert answer.outputs[0].prompt_logprobs == [None]


def test_what_does_not_fit_the_structure_ends_its_own_request() -> None:
    with make_worker() as worker:
        bad = worker.submit(PROMPT, structure=STRUCTURE, allowed_token_ids=(1,), max_tokens=3)
        good = worker.submit(PROMPT)
        assert "Nothing can be drawn" in bad.wait().error
        assert good.wait().finish_reason == "length"
