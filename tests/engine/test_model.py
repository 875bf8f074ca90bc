from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from tollbridge.engine.model import load_model, quiet_transformers, refuse_unsupported
from tollbridge.errors import StartupError, UnsupportedError

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def folder(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A copy to be spoilt."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_is_known_of_a_model(tiny_model_dir: Path) -> None:
    loaded = load_model(tiny_model_dir, name="tiny", dtype="float32")
    assert (loaded.num_layers, loaded.num_heads, loaded.num_kv_heads, loaded.head_dim) == (4, 4, 2, 16)
    assert (loaded.vocab_size, loaded.max_positions, loaded.eos_token_ids) == (512, 4096, (2,))
    assert loaded.dtype is torch.float32
    assert not loaded.module.training


def test_a_device_that_does_not_exist(tiny_model_dir: Path) -> None:
    with pytest.raises(StartupError, match=r"^The device 'potato' cannot be used: .*\. Set engine\.device to cpu"):
        load_model(tiny_model_dir, name="tiny", device="potato")


def test_dtype_applies_to_the_weights(tiny_model_dir: Path) -> None:
    loaded = load_model(tiny_model_dir, name="tiny", dtype="bfloat16")
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("family", "settings", "feature"),
    [
        ("mistral", {"sliding_window": 128}, "sliding attention window"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 1}, "sliding"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("gemma2", {}, "sliding|soft-capping|layer_types"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "depends on the batch",
        ),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised"),
        ("t5", {}, "encoder and a decoder"),
        ("llava", {}, "modalities"),
        ("deepseek_v3", {}, "latent attention"),
        ("mamba", {}, "layer_types|state-space"),
        ("gpt_oss", {}, "layer_types|sinks|sliding"),
        ("falcon", {"alibi": True}, "ALiBi"),
    ],
)
def test_features_are_refused_by_name(family: str, settings: dict[str, Any], feature: str) -> None:
    known = SMALL if family in ("llama", "mistral", "qwen2", "qwen3") else {}
    with quiet_transformers():
        config = AutoConfig.for_model(family, **known, **settings)
    with pytest.raises(UnsupportedError, match=feature) as caught:
        refuse_unsupported(config, "owner/name")
    assert "owner/name" in caught.value.message
    assert family in caught.value.message


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 4096}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": None}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    ],
)
def test_what_is_supported_passes(family: str, settings: dict[str, Any]) -> None:
    refuse_unsupported(AutoConfig.for_model(family, **SMALL, **settings), "m")


def test_refusal_comes_before_the_weights_are_read(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    change_config(folder, model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=64)
    with pytest.raises(UnsupportedError, match="sliding"):
        load_model(folder, name="m")


def test_missing_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(StartupError, match="could not be loaded"):
        load_model(folder, name="m")


def test_weights_of_another_shape(folder: Path) -> None:
    change_config(folder, intermediate_size=96)
    with pytest.raises(StartupError, match="lacks 12 tensors"):
        load_model(folder, name="m")


def test_weights_that_lack_a_tensor(folder: Path) -> None:
    change_config(folder, num_hidden_layers=5)
    with pytest.raises(StartupError, match=r"lacks 9 tensors .*layers\.4\."):
        load_model(folder, name="m")


def test_broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(StartupError, match=r"no usable config\.json"):
        load_model(folder, name="m")


def test_unknown_architecture(folder: Path) -> None:
    change_config(folder, model_type="never_heard_of")
    with pytest.raises(StartupError, match=r"no usable config\.json"):
        load_model(folder, name="m")


def test_several_end_tokens(folder: Path) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [2, 7]}))
    assert load_model(folder, name="m", dtype="float32").eos_token_ids == (2, 7)


def test_loading_prints_nothing(tiny_model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = transformers_logging.get_verbosity()
    load_model(tiny_model_dir, name="tiny", dtype="float32")
    assert capfd.readouterr() == ("", "")
    assert transformers_logging.get_verbosity() == before
    assert transformers_logging.is_progress_bar_enabled()
