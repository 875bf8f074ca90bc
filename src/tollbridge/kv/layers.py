"""Which layers of a model are of which kind, and the attention parts that follow from it."""

from __future__ import annotations

from collections.abc import Sequence

from tollbridge.errors import UnsupportedError
from tollbridge.kv.geometry import Part, full, latent, windowed
from tollbridge.kv.modelconfig import ModelConfig

FULL, SLIDING, CHUNKED, RECURRENT = "full", "sliding", "chunked", "recurrent"
_LAYER_TYPES = {
    "full_attention": FULL,
    "attention": FULL,
    "global": FULL,
    "global_attention": FULL,
    "sliding_attention": SLIDING,
    "local": SLIDING,
    "sliding_window_attention": SLIDING,
    "chunked_attention": CHUNKED,
    "linear_attention": RECURRENT,
    "mamba": RECURRENT,
    "conv": RECURRENT,
}


def kv_heads(config: ModelConfig) -> int:
    """Return the KV heads; a model without the key has as many as query heads."""
    return config.maybe_number("num_key_value_heads", "n_head_kv", "num_kv_heads", "n_kv_heads") or config.heads


def window_of(config: ModelConfig, default: int | None = None) -> int | None:
    """Return the sliding window; None where there is none or the config switches it off (Qwen2.5)."""
    if config.values.get("use_sliding_window") is False:
        return None
    if "sliding_window" in config.values and config.values["sliding_window"] is None:
        return None
    return config.maybe_number("sliding_window", "sliding_window_size", "attention_window_size") or default


def layer_kinds(config: ModelConfig) -> list[str]:
    """Return the kinds that `layer_types` names, empty when there is none; UnsupportedError for an unknown one."""
    names = config.strings("layer_types") or config.strings("layers_block_type")
    num_layers = config.number("num_hidden_layers", "n_layer", "num_layers", default=len(names) or None)
    if names and len(names) < num_layers:
        raise UnsupportedError(
            f"The config of {config.model_type!r} has {num_layers} layers and {len(names)} layer_types: mend it."
        )
    unknown = next((name for name in names if name not in _LAYER_TYPES and name not in _WITHOUT_KV), None)
    if unknown is not None:
        raise UnsupportedError(f"The config of {config.model_type!r} has layers of the unknown type {unknown[:40]!r}.")
    return [_LAYER_TYPES[name] for name in names[:num_layers] if name in _LAYER_TYPES]


_WITHOUT_KV = {"mlp", "moe", "feed_forward"}


def by_layer_types(config: ModelConfig) -> list[Part]:
    kinds = layer_kinds(config)
    if RECURRENT in kinds:
        raise UnsupportedError(
            f"The config of {config.model_type!r} has recurrent layers, which this architecture is not known to have."
        )
    window = window_of(config) if SLIDING in kinds else config.maybe_number("attention_chunk_size")
    return attention(config, kinds, window)


def attention(
    config: ModelConfig,
    kinds: Sequence[str],
    window: int | None,
    *,
    heads: int | None = None,
    size: int | None = None,
) -> list[Part]:
    """Return full and windowed attention by kind; windowed layers without a window are full."""
    heads, size = heads or kv_heads(config), size or config.head_size
    parts = []
    for kind in (FULL, SLIDING, CHUNKED):
        count = sum(each == kind for each in kinds)
        if kind == FULL or window is None:
            parts.append(full(count, heads, size))
        else:
            parts.append(windowed(count, heads, size, window, "chunked" if kind == CHUNKED else "sliding"))
    return parts


def latent_of(config: ModelConfig, num_layers: int) -> Part:
    return latent(num_layers, config.number("kv_lora_rank"), config.number("qk_rope_head_dim"))
