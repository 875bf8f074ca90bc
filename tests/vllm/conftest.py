"""Fixtures of the tests that start real vLLM servers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.vllm.pair import PYTHON


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Know the marker before the modules that use it are imported."""
    if not any(line.startswith("vllm:") for line in collector.config.getini("markers")):
        collector.config.addinivalue_line("markers", "vllm: starts real vLLM servers (TOLLBRIDGE_VLLM_PYTHON)")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, or a skip where no interpreter with vLLM is at hand."""
    if not Path(PYTHON).exists():
        pytest.skip(f"no interpreter with vLLM at {PYTHON}: set TOLLBRIDGE_VLLM_PYTHON")
    folder = tmp_path_factory.mktemp("tiny-vllm")
    script = Path(__file__).with_name("make_model.py")
    subprocess.run([PYTHON, str(script), str(folder)], check=True, capture_output=True)
    return folder
