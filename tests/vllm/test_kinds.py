"""Other models and deployments on real vLLM: they split as well, or do not start and say why."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.vllm.conftest import Models
from tests.vllm.pair import Pair, Server, outcome, prompt, report, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

SHORT = ("--max-model-len", "2048", "--max-num-batched-tokens", "500")
WHOLE = ("--max-model-len", "2048", "--max-num-batched-tokens", "2048")  # that kernel takes no prompt in pieces
LENGTHS = (2, 16, 17, 128, 129, 130, 499, 500, 501, 777, 1200)


@dataclass(frozen=True)
class Kind:
    model: str
    args: tuple[str, ...]
    exact: bool = True  # decode and prefill compute alike, so that the last bit of a logit is the same


KINDS = {
    # latent attention has one kernel for prefill and another for decode; CPU_MLA is the one that takes float32
    "mla": Kind("mla", (*WHOLE, "--attention-backend", "CPU_MLA"), exact=False),
    "gemma3": Kind("gemma3", SHORT),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def pair(kind: Kind, models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("kinds")
    p, d = (Server(name, models(kind.model), folder, kind.args, tokenizer=True) for name in "pd")
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


def test_a_model_without_kv_does_not_start(models: Models, tmp_path: Path) -> None:
    server = Server("refused", models("mamba"), tmp_path, (*SHORT, "--dtype", "bfloat16"))
    assert "TollbridgeConnector cannot split this deployment: its KV cache is of the kind MambaSpec" in server.refusal()
