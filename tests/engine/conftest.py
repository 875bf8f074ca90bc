from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def family_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One tiny model of each family."""
    from tollbridge.engine.tiny import make_tiny_model

    root = tmp_path_factory.mktemp("families")
    return {
        family: make_tiny_model(root / family, 7, family=family) for family in ("llama", "qwen2", "qwen3", "mistral")
    }
