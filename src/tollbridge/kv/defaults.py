"""What a config means by a key that it leaves out: the defaults of transformers' config classes (5.17).

A config at the top of a config.json names its layers, heads and width, and is refused where it does not. One inside
another is saved without the keys that equal their class's defaults (LLaVA's `text_config` has none of these).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_OF_128 = (
    "ernie4_5", "glm", "glm4", "helium", "llama4", "llama4_text", "mellum", "minimax_m2", "ministral3", "nemotron_h",
    "qwen3", "qwen3_vl_text", "seed_oss", "solar_open",
)  # fmt: skip
_OF_256 = ("gemma", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
# Head sizes that do not follow from hidden size and heads.
HEAD_SIZES: Mapping[str, int] = MappingProxyType(dict.fromkeys(_OF_128, 128) | dict.fromkeys(_OF_256, 256))

_KEYS = ("num_hidden_layers", "num_attention_heads", "hidden_size", "num_key_value_heads")
_NESTED: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "llama": (32, 32, 4096),
        "mistral": (32, 32, 4096, 8),
        "ministral3": (34, 32, 4096, 8),
        "mixtral": (32, 32, 4096, 8),
        "qwen2": (32, 32, 4096, 32),
        "qwen2_vl_text": (80, 64, 8192, 8),
        "qwen2_5_vl_text": (80, 64, 8192, 8),
        "qwen3": (32, 32, 4096, 32),
        "qwen3_moe": (24, 32, 2048, 4),
        "qwen3_vl_text": (32, 32, 4096, 32),
        "qwen3_vl_moe_text": (24, 16, 2048, 16),
        "qwen3_5_text": (32, 16, 4096, 4),
        "qwen3_5_moe_text": (40, 16, 2048, 2),
        "gemma": (28, 16, 3072, 16),
        "gemma2": (26, 8, 2304, 4),
        "gemma3_text": (26, 8, 2304, 4),
        "gemma3n_text": (35, 8, 2048, 2),
        "gemma4_text": (30, 8, 2304, 4),
        "glm4v_text": (40, 32, 4096, 2),
        "glm4v_moe_text": (46, 96, 4096, 8),
        "llama4_text": (48, 40, 5120, 8),
        "phi3": (32, 32, 3072),
        "opt": (12, 12, 768),
        "cohere": (40, 64, 8192),
        "cohere2": (40, 64, 8192),
        "granite": (32, 32, 4096),
        "aria_text": (32, 32, 4096),
        "smollm3": (36, 16, 2048, 4),
        "lfm2": (32, 32, 2560, 8),
    }
)


def of_nested(model_type: str) -> dict[str, int]:
    """Return the sizes that a nested config of this type may leave out; none for a type that is not known to."""
    return dict(zip(_KEYS, _NESTED.get(model_type, ()), strict=False))
