from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.driver import generate, make_bench
from tollbridge.engine.tiny import make_tiny_model


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_seed_decides_every_byte(tmp_path: Path) -> None:
    first = contents(make_tiny_model(tmp_path / "a", 5))
    assert first == contents(make_tiny_model(tmp_path / "b", 5))
    assert first != contents(make_tiny_model(tmp_path / "c", 6))


def test_the_global_generator_is_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    want = torch.rand(3)
    torch.manual_seed(1)
    make_tiny_model(tmp_path)
    assert torch.equal(torch.rand(3), want)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_outputs_are_varied_and_sensitive(family_dirs: dict[str, Path], family: str) -> None:
    """Texts do not loop, and depend on the first token of the prompt: a wrong byte of KV shows."""
    bench = make_bench(family_dirs[family])
    prompt = list(range(100, 140))
    one, other = generate(bench, [prompt, [99, *prompt[1:]]], 40)
    assert len(set(one)) > 20
    assert one[:8] != other[:8]


def test_size(tiny_model_dir: Path) -> None:
    assert sum(path.stat().st_size for path in tiny_model_dir.iterdir()) < 2_000_000
