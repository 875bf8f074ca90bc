"""Fixtures for several packages: models on disk, and the vLLM servers that packages share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tollbridge.obs.logs import JsonFormatter, KeyValueFormatter

if TYPE_CHECKING:
    from tests.vllm.pair import Pair

ALONE = ("test_faults.py", "test_nixl.py")

# How long an example takes says what else the machine does. Each run has the same examples, so that no change is
# refused for what another brought in; `--hypothesis-profile=explore` looks for others.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("explore"), derandomize=True, database=None)
settings.load_profile("same")


@pytest.fixture(autouse=True)
def logs_as_they_were() -> Iterator[None]:
    """A command that is run inside a test sends the logs of the whole process to a stream that ends with the test."""
    root, ours = logging.getLogger(), logging.getLogger("tollbridge")
    levels = root.level, ours.level
    yield
    for handler in list(root.handlers):
        if isinstance(handler.formatter, (KeyValueFormatter, JsonFormatter)):
            root.removeHandler(handler)
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a byte-level tokenizer and a chat template."""
    from tollbridge.engine.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2 in the model cache, fetched when it is not there. A test that needs it fails when it cannot be had."""
    from tollbridge.engine.store import pull_smollm2
    from tollbridge.errors import TollbridgeError

    try:
        return pull_smollm2()
    except TollbridgeError as error:
        pytest.fail(f"SmolLM2 is needed by tests marked `model`: {error.message}", pytrace=False)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny models by kind, see vllm/make_model.py. Fails where no interpreter with vLLM is at hand: `-m "not vllm"`."""
    from tests.vllm.pair import PYTHON, make_model

    if not Path(PYTHON).exists():
        pytest.fail(f"no interpreter with vLLM at {PYTHON}: run `make .venv-vllm/.installed`", pytrace=False)
    return cache(lambda kind: make_model(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture(scope="session")
def tiny_model(models: Callable[[str], Path]) -> Path:
    """A tiny Llama for vLLM."""
    return models("llama")


@pytest.fixture(scope="session")
def pair(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two servers with all that a production one may have switched on: tokenizer, tool parser, an adapter "poet"."""
    from tests.vllm.conftest import CHUNK
    from tests.vllm.pair import PATIENT, Pair, Server

    args = (
        "--max-model-len", "2048", "--max-num-batched-tokens", str(CHUNK), "--enable-scale-out",
        "--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}',
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        "--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"poet={models('lora')}",
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("pair")
    p, d = (Server(name, models("llama"), folder, args, dict(PATIENT), tokenizer=True) for name in "pd")
    with Pair(p, d).running() as pair:
        yield pair


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the packages that share `pair` together, and before it starts those whose own servers need all cores."""
    alone = [item for item in items if item.path.name in ALONE and "/tests/vllm/" in item.path.as_posix()]
    shared = [item for item in items if "/tests/conformance/" in item.path.as_posix()]
    moved = {*alone, *shared}
    rest = [item for item in items if item not in moved]
    first = next((at for at, item in enumerate(rest) if "/tests/vllm/" in item.path.as_posix()), len(rest))
    items[:] = rest[:first] + alone + shared + rest[first:]
