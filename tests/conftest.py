"""Fixtures for several packages: models on disk. They import torch only when used."""

from __future__ import annotations

from pathlib import Path

import pytest


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
