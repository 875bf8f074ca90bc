from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tollbridge.engine.cache import KVShape
from tollbridge.engine.fingerprint import fingerprint, model_digest
from tollbridge.errors import StartupError


@pytest.fixture
def folder(tiny_model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def test_fields(tiny_model_dir: Path) -> None:
    shape = KVShape(num_layers=4, block_size=16, num_kv_heads=2, head_dim=16, dtype=torch.bfloat16)
    got = fingerprint(tiny_model_dir, shape)
    assert (got.dtype, got.num_layers, got.num_kv_heads, got.head_size, got.block_size) == ("bfloat16", 4, 2, 16, 16)
    assert (got.layout, got.isa) == ("token-major:k,v", "any")
    assert len(got.model) == 32


def test_a_copy_is_the_same(tiny_model_dir: Path, folder: Path) -> None:
    assert model_digest(folder) == model_digest(tiny_model_dir)


def test_how_tensors_are_spread_over_files_does_not_matter(folder: Path) -> None:
    want = model_digest(folder)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:9]}, folder / "b.safetensors")
    save_file({name: tensors[name] for name in names[9:]}, folder / "a.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    assert model_digest(folder) == want


@pytest.mark.parametrize("key", ["transformers_version", "dtype", "eos_token_id"])
def test_what_does_not_shape_kv_does_not_matter(folder: Path, key: str) -> None:
    want = model_digest(folder)
    change(folder, key, "other")
    assert model_digest(folder) == want


@pytest.mark.parametrize("key", ["rope_parameters", "rms_norm_eps", "model_type", "a_new_key"])
def test_what_may_shape_kv_matters(folder: Path, key: str) -> None:
    want = model_digest(folder)
    change(folder, key, "other")
    assert model_digest(folder) != want


def change(folder: Path, key: str, value: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


def test_other_weights_matter(folder: Path) -> None:
    want = model_digest(folder)
    tensors = load_file(folder / "model.safetensors")
    name = sorted(tensors)[5]
    tensors[name] = tensors[name] * 1.001
    save_file(tensors, folder / "model.safetensors")
    assert model_digest(folder) != want


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(StartupError, match=r"no \*\.safetensors"):
        model_digest(folder)
