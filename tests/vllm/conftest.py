"""Fixtures of the tests that start real vLLM servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.vllm.pair import PYTHON, Pair, Server, make_model

BLOCK = 128  # vLLM's default on a CPU
CHUNK = 500  # prompt tokens per step; inside a block, so a step may end just before the last token, in its block

Models = Callable[[str], Path]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Tiny models by kind, see make_model.py. Fails where no interpreter with vLLM is at hand: `-m "not vllm"`."""
    if not Path(PYTHON).exists():
        pytest.fail(f"no interpreter with vLLM at {PYTHON}: run `make .venv-vllm/.installed`", pytrace=False)
    return cache(lambda kind: make_model(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture(scope="session")
def tiny_model(models: Models) -> Path:
    """A tiny Llama for vLLM."""
    return models("llama")


@pytest.fixture(scope="package")
def pair(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two servers with all that a production one may have switched on: tokenizer, tool parser, an adapter "poet"."""
    args = (
        "--max-model-len", "2048", "--max-num-batched-tokens", str(CHUNK),
        "--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}',
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        "--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"poet={models('lora')}",
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("pair")
    p, d = (Server(name, models("llama"), folder, args, tokenizer=True) for name in "pd")
    with Pair(p, d).running() as pair:
        yield pair
