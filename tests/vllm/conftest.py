"""Fixtures of the tests that start real vLLM servers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.vllm.pair import PYTHON


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama for vLLM. Fails where no interpreter with vLLM is at hand: `-m "not vllm"` leaves its tests out."""
    if not Path(PYTHON).exists():
        pytest.fail(f"no interpreter with vLLM at {PYTHON}: run `make .venv-vllm/.installed`", pytrace=False)
    folder = tmp_path_factory.mktemp("tiny-vllm")
    script = Path(__file__).with_name("make_model.py")
    subprocess.run([PYTHON, str(script), str(folder)], check=True, capture_output=True)
    return folder
