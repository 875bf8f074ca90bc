"""One set of servers for the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.targets import NAMES, Target, all_targets
from tests.vllm.pair import Pair


@pytest.fixture(scope="session")
def targets(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Target]]:
    with all_targets(pair, tmp_path_factory.mktemp("conformance")) as made:
        yield made


@pytest.fixture(params=NAMES)
def target(request: pytest.FixtureRequest, targets: dict[str, Target]) -> Target:
    return targets[request.param]


@pytest.fixture(scope="session")
def taste(pair: Pair) -> dict[str, int]:
    """A `logit_bias` that keeps a model without any sense from endless white space, and lets it end when it may."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(pair.d.model))
    pieces = {token: tokenizer.decode([token]) for token in range(len(tokenizer))}
    spaces = {str(token): -100 for token, text in pieces.items() if any(map(str.isspace, text))}
    return spaces | {str(tokenizer.eos_token_id): 100}


@pytest.fixture
def reference(targets: dict[str, Target]) -> Target:
    """vLLM itself."""
    return targets["vllm"]
