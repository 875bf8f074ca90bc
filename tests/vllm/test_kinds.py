"""Other models and deployments on real vLLM: they split as well, or do not start and say why."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import Models
from tests.vllm.pair import PATIENT, Pair, Server, outcome, prompt, report, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

SHORT = ("--max-model-len", "2048", "--max-num-batched-tokens", "500")
WHOLE = ("--max-model-len", "2048", "--max-num-batched-tokens", "2048")  # that kernel takes no prompt in pieces
LENGTHS = (2, 16, 17, 128, 129, 130, 499, 500, 501, 777, 1200)


@dataclass(frozen=True)
class Kind:
    model: str
    args: tuple[str, ...]
    exact: bool = True  # vLLM computes a token alike in a prompt and as the next one after it


KINDS = {
    # vLLM's CPU has one kernel of latent attention for prompts and another for decode, which differ by 1 to 3 nats
    # without any split; CPU_MLA is the one that takes float32
    "mla": Kind("mla", (*WHOLE, "--attention-backend", "CPU_MLA"), exact=False),
    "gemma3": Kind("gemma3", SHORT),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def pair(kind: Kind, models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("kinds")
    p, d = (Server(name, models(kind.model), folder, kind.args, dict(PATIENT), tokenizer=True) for name in "pd")
    with Pair(p, d).running() as pair:
        yield pair


async def test_split_equals_local(pair: Pair, kind: Kind) -> None:
    texts = [prompt(length, seed=800 + length) for length in LENGTHS]
    answers = await asyncio.gather(*map(pair.split, texts))
    for text, (_, decode) in zip(texts, answers, strict=True):
        assert outcome(decode) == "done"
        assert report(decode).get("loaded_tokens", 0) == len(text) - 1
        if kind.exact:
            assert tokens(decode) == await pair.local(text)
    assert await pair.idle()


async def test_split_continues_as_decode_does(pair: Pair) -> None:
    """A token computed on KV that came over the wire has the logits that it has on decode's own KV.

    Its own KV is of a prompt one token shorter, so the last bit of it may differ, and sharp attention enlarges that:
    three quarters of the prompts have to agree.
    """
    off: list[float] = []
    for length in LENGTHS:
        text = prompt(length, seed=900 + length)
        local = await pair.complete(pair.d, text, 2, cache_salt=secrets.token_hex(8), logprobs=20)
        _, split = await pair.split([*text, tokens(local)[0]], 1, logprobs=20)
        own, came = logprobs(local)[1], logprobs(split)[0]
        off.append(max((abs(own[token] - came[token]) for token in own.keys() & came.keys()), default=math.inf))
    assert sum(nats < 0.1 for nats in off) >= 0.75 * len(off), off


def logprobs(answer: dict[str, Any]) -> list[dict[str, float]]:
    """Return the best tokens of each step and their logprobs."""
    return list(answer["choices"][0]["logprobs"]["top_logprobs"])


def test_a_model_without_kv_does_not_start(models: Models, tmp_path: Path) -> None:
    server = Server("refused", models("mamba"), tmp_path, (*SHORT, "--dtype", "bfloat16"))
    assert "TollbridgeConnector cannot split this deployment: its KV cache is of the kind MambaSpec" in server.refusal()
