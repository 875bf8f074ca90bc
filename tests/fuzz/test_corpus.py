"""Replay of what fuzzing found worth keeping; see run.py."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzz.seeds import seeds
from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"


@pytest.mark.parametrize("name", TARGETS)
def test_corpus(name: str) -> None:
    inputs = sorted((CORPUS / name).iterdir())
    assert inputs, "the corpus is missing"
    for path in inputs:
        TARGETS[name](path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_seeds(name: str) -> None:
    for data in seeds(name):
        TARGETS[name](data)


@pytest.mark.parametrize("name", TARGETS)
def test_random_inputs(name: str) -> None:
    rng = random.Random(1)
    for size in range(200):
        TARGETS[name](rng.randbytes(size))


def test_the_corpus_is_small() -> None:
    assert sum(path.stat().st_size for path in CORPUS.rglob("*")) < 200_000
