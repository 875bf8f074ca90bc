"""Published configs against the table of worked KV sizes, and the rules that make them come out."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollbridge.errors import UnsupportedError
from tollbridge.kv.models import geometry, known_architectures

DATA = Path(__file__).parents[1] / "data"
ROWS = list(csv.DictReader((DATA / "kv_bytes.csv").read_text().splitlines()))
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "fp8"}

# Of each published config.json the keys that bear on its KV cache, spelt as on the model hubs.
CONFIGS: dict[str, dict[str, Any]] = json.loads((DATA / "kv_configs.json").read_text())

TINY = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-{row['dtype']}")
def test_every_worked_row(row: dict[str, str]) -> None:
    found = geometry(CONFIGS[row["model"]], DTYPES[row["dtype"]])  # type: ignore[arg-type]
    assert found.bytes_per_token == int(row["bytes_per_token"])
    assert found.bytes_per_token_long == int(row["bytes_per_token_long"])
    assert found.fixed_bytes == int(row["fixed_state_bytes_per_seq"])
    for num_tokens in (128, 1024, 8192, 32768):
        assert found.bytes_at(num_tokens) == int(row[f"kv_bytes_at_{num_tokens}"])
    assert list(found.windows) == ([int(row["sliding_window"])] if row["sliding_window"] else [])


OTHERS: dict[str, tuple[dict[str, Any], int]] = {
    "falcon-7b": (
        {"num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544, "multi_query": True},
        32 * 2 * 64,
    ),
    "falcon-40b": (
        {"num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8, "hidden_size": 8192}
        | {"new_decoder_architecture": True},
        60 * 2 * 8 * 64,
    ),
    "gpt_bigcode": ({"n_layer": 40, "n_head": 48, "n_embd": 6144, "multi_query": True}, 40 * 2 * 128),
    "chatglm": (
        {"num_layers": 28, "num_attention_heads": 32, "hidden_size": 4096, "kv_channels": 128}
        | {"multi_query_attention": True, "multi_query_group_num": 2},
        28 * 2 * 2 * 128,
    ),
    "dbrx": ({"n_layers": 40, "n_heads": 48, "d_model": 6144, "attn_config": {"kv_n_heads": 8}}, 40 * 2 * 8 * 128),
    "jamba": (
        {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
        | {"attn_layer_period": 8, "attn_layer_offset": 4},
        4 * 2 * 8 * 128,
    ),
    "llama": (TINY | {"head_dim": 16}, 4 * 2 * 2 * 16),
    "llama-without-kv-heads": (TINY | {"num_key_value_heads": None}, 4 * 2 * 8 * 8),
    "qwen3-without-head-size": (TINY, 4 * 2 * 2 * 128),  # 128 is the class's default, not hidden / heads
    "RefinedWeb-40b": ({"n_layer": 60, "n_head": 128, "n_head_kv": 8, "hidden_size": 8192}, 60 * 2 * 8 * 64),
    "RefinedWebModel-7b": ({"n_layer": 32, "n_head": 71, "hidden_size": 4544, "multi_query": True}, 32 * 2 * 64),
    "mpt-mqa": (
        {"n_layers": 4, "n_heads": 8, "d_model": 64, "attn_config": {"attn_type": "multiquery_attention"}},
        4 * 2 * 8,
    ),
    "hunyuan-large": (
        {"num_hidden_layers": 64, "num_attention_heads": 80, "num_key_value_heads": 8, "hidden_size": 6400}
        | {"use_cla": True, "cla_share_factor": 2},
        32 * 2 * 8 * 80,
    ),
    "zamba2-by-types": (
        TINY | {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "attention_head_dim": 16},
        2 * 2 * 2 * 16,
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures(name: str) -> None:
    config, elements_per_token = OTHERS[name]
    found = geometry({"model_type": name.partition("-")[0]} | config, "bfloat16")
    assert found.bytes_per_token == 2 * elements_per_token


@pytest.mark.parametrize(
    ("model_type", "config", "num_full"),
    [
        ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}, 3),
        ("qwen3", {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 3}, 4),
        ("qwen2_vl_text", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}, 0),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 16}, 3),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, 1),
        ("starcoder2", {}, 4),
        ("mistral", {"sliding_window": None}, 4),
    ],
)
def test_which_layers_slide(model_type: str, config: dict[str, Any], num_full: int) -> None:
    found = geometry({"model_type": model_type, **TINY, "head_dim": 8, **config}, "bfloat16")
    assert found.bytes_per_token == 4 * 2 * 2 * 8 * 2
    assert found.bytes_per_token_long == num_full * 2 * 2 * 8 * 2


NESTED: dict[str, tuple[dict[str, Any], int]] = {  # as saved inside another config; bytes a token in the end
    "llava-1.5-7b": ({"model_type": "llama", "vocab_size": 32064}, 32 * 2 * 4096 * 2),
    "llava-v1.6-mistral-7b": (
        {"model_type": "mistral", "num_key_value_heads": 8, "sliding_window": None}, 32 * 2 * 8 * 128 * 2,
    ),
    "mistral-small-3.1": (
        {"model_type": "mistral", "num_hidden_layers": 40, "num_key_value_heads": 8, "num_attention_heads": 32}
        | {"hidden_size": 5120, "head_dim": 128, "sliding_window": None},
        40 * 2 * 8 * 128 * 2,
    ),
    "gemma-3-4b": (
        {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024},
        5 * 2 * 4 * 256 * 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NESTED)
def test_a_nested_config_leaves_out_what_its_class_has_by_default(name: str) -> None:
    inner, long = NESTED[name]
    found = geometry({"model_type": "wrapper", "dtype": "bfloat16", "text_config": inner}, "bfloat16")
    assert found.bytes_per_token_long == long


def test_at_the_top_nothing_is_assumed_of_layers_and_width() -> None:
    with pytest.raises(UnsupportedError, match="num_hidden_layers"):
        geometry({"model_type": "llama", "vocab_size": 32064})


def test_a_checkpoint_with_scales_for_fp8_keys_keeps_its_cache_in_fp8() -> None:
    scheme = {"type": "float", "num_bits": 8}
    config = {"model_type": "llama", **TINY, "quantization_config": {"kv_cache_scheme": scheme}}
    assert geometry(config).dtype == "fp8"
    assert geometry(config, "bfloat16").dtype == "bfloat16"
    assert geometry(config | {"quantization_config": {"kv_cache_scheme": None}}).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "bamba", "attn_layer_indices": ["x"]}, "attn_layer_indices"),
        ({"model_type": "bamba", "attn_layer_indices": [4]}, "beyond its 4 layers"),
        ({"model_type": "zamba2"}, "hybrid_layer_ids"),
        ({"model_type": "kimi_linear", "linear_attn_config": {"num_heads": 2, "head_dim": 8}}, "full_attn_layers"),
        ({"model_type": "llama", "num_attention_heads": 80}, "more heads"),
    ],
)
def test_what_cannot_be_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        geometry(TINY | config)


def test_the_dtype_of_the_weights_is_the_default() -> None:
    assert geometry({"model_type": "llama", **TINY, "torch_dtype": "float32"}).dtype == "float32"
    assert geometry({"model_type": "llama", **TINY}).dtype == "bfloat16"


def test_a_window_that_is_switched_off_is_ignored() -> None:
    config = {"model_type": "qwen2", **TINY, "sliding_window": 16, "max_window_layers": 2}
    assert geometry(config | {"use_sliding_window": False}).windows == ()
    assert geometry(config | {"use_sliding_window": True}).windows == (16,)
    assert geometry(config | {"use_sliding_window": True}).bytes_per_token_long * 2 == geometry(config).bytes_per_token


@pytest.mark.parametrize("broken", ["llamma", "unheard-of", ""])
def test_an_unknown_architecture_is_refused_by_name(broken: str) -> None:
    with pytest.raises(UnsupportedError, match=broken or "no model_type"):
        geometry({"model_type": broken, **TINY})


def test_a_near_name_is_suggested() -> None:
    with pytest.raises(UnsupportedError, match="Did you mean 'llama'"):
        geometry({"model_type": "lama", **TINY})


@pytest.mark.parametrize("value", [0, -3, 1.5, "many", float("nan"), 10**12])
def test_a_senseless_number_is_refused(value: object) -> None:
    with pytest.raises(UnsupportedError, match="num_hidden_layers"):
        geometry({"model_type": "llama", **TINY, "num_hidden_layers": value})


def test_a_layer_type_nobody_knows_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="quantum"):
        geometry({"model_type": "llama", **TINY, "layer_types": ["quantum"] * 4})


def test_fewer_layer_types_than_layers_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="4 layers and 1"):
        geometry({"model_type": "qwen3", **TINY, "layer_types": ["full_attention"]})


@given(name=st.sampled_from(sorted(CONFIGS)), num_tokens=st.integers(0, 200_000))
def test_growth_lies_between_the_two_slopes(name: str, num_tokens: int) -> None:
    found = geometry(json.loads(json.dumps(CONFIGS[name])))
    step = found.bytes_at(num_tokens + 1) - found.bytes_at(num_tokens)
    assert found.bytes_per_token_long <= step <= found.bytes_per_token
    assert found.bytes_at(0) == found.fixed_bytes


def test_many_architectures_are_known() -> None:
    assert {"llama", "qwen3", "deepseek_v3", "gpt_oss", "granitemoehybrid"} <= set(known_architectures())
