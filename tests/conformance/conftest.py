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


@pytest.fixture
def reference(targets: dict[str, Target]) -> Target:
    """vLLM itself."""
    return targets["vllm"]
