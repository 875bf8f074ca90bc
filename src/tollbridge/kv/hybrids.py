"""Models whose layers keep a recurrent state (Mamba, linear attention, short convolutions), and hybrids with attention.

The states are sized as vLLM keeps them (vllm/model_executor/layers/mamba/mamba_utils.py).
"""

from __future__ import annotations

from tollbridge.errors import UnsupportedError
from tollbridge.kv.geometry import Part, element_bytes, full, product, recurrent, windowed
from tollbridge.kv.layers import FULL, RECURRENT, attention, kv_heads, latent_of, layer_kinds
from tollbridge.kv.modelconfig import ModelConfig


def gated_delta_net(config: ModelConfig) -> list[Part]:
    """Qwen3-Next, Qwen3.5: full attention in every `full_attention_interval`-th layer, Gated DeltaNet in the others."""
    kinds = layer_kinds(config)
    if not kinds:
        every = config.number("full_attention_interval", default=4)
        kinds = [FULL if (index + 1) % every == 0 else RECURRENT for index in range(config.layers)]
    key = product(config.number("linear_num_key_heads"), config.number("linear_key_head_dim"))
    heads, value = config.number("linear_num_value_heads"), config.number("linear_value_head_dim")
    state = product(heads, config.number("linear_key_head_dim"), value, _state_bytes(config))
    part = recurrent(
        kinds.count(RECURRENT),
        conv_channels=2 * key + heads * value,
        conv_kernel=config.number("linear_conv_kernel_dim", default=4),
        conv_bytes=element_bytes(config.dtype),
        state_bytes=state,
    )
    return [*attention(config, [kind for kind in kinds if kind != RECURRENT], None), part]


def kimi_linear(config: ModelConfig) -> list[Part]:
    """Latent attention in some layers, Kimi Delta Attention (three convolutions, a float32 state) in the others."""
    linear, kinds = config.section("linear_attn_config"), layer_kinds(config)
    heads = linear.maybe_number("num_heads") or config.number("linear_num_heads")
    size = linear.maybe_number("head_dim") or config.number("linear_head_dim")
    num_full = kinds.count(FULL) if kinds else len(linear.numbers("full_attn_layers") or [])
    if not kinds and not num_full:
        raise UnsupportedError("The config of 'kimi_linear' has no full_attn_layers: its KV cache is not known.")
    part = recurrent(
        config.layers - num_full,
        conv_channels=3 * heads * size,
        conv_kernel=linear.maybe_number("short_conv_kernel_size") or config.number("linear_conv_kernel_dim", default=4),
        conv_bytes=element_bytes(config.dtype),
        state_bytes=product(heads, size, size, 4),
    )
    return [latent_of(config, num_full), part]


def _state_bytes(config: ModelConfig) -> int:
    return element_bytes(str(config.values.get("mamba_ssm_dtype") or config.dtype))


def _mamba2(
    config: ModelConfig, num_layers: int, *, heads: int, head_dim: int, state: int, groups: int, kernel: int
) -> Part:
    return recurrent(
        num_layers,
        conv_channels=heads * head_dim + 2 * groups * state,
        conv_kernel=kernel,
        conv_bytes=element_bytes(config.dtype),
        state_bytes=product(heads, head_dim, state, _state_bytes(config)),
    )


def _mamba1(config: ModelConfig, num_layers: int, *, inner: int, state: int, kernel: int) -> Part:
    return recurrent(
        num_layers,
        conv_channels=inner,
        conv_kernel=kernel,
        conv_bytes=element_bytes(config.dtype),
        state_bytes=product(inner, state, _state_bytes(config)),
    )


def pure_mamba1(config: ModelConfig) -> list[Part]:
    inner = config.maybe_number("intermediate_size", "d_inner") or config.number("expand", default=2) * config.hidden
    state, kernel = config.number("state_size", default=16), config.number("conv_kernel", default=4)
    return [_mamba1(config, config.layers, inner=inner, state=state, kernel=kernel)]


def pure_mamba2(config: ModelConfig) -> list[Part]:
    part = _mamba2(
        config,
        config.layers,
        heads=config.number("num_heads", default=128),
        head_dim=config.number("head_dim", default=64),
        state=config.number("state_size", default=128),
        groups=config.number("n_groups", default=8),
        kernel=config.number("conv_kernel", default=4),
    )
    return [part]


def jamba(config: ModelConfig) -> list[Part]:
    period, offset = config.number("attn_layer_period", default=8), config.values.get("attn_layer_offset", 4)
    num_full = sum(index % period == offset for index in range(config.layers))
    part = _mamba1(
        config,
        config.layers - num_full,
        inner=config.number("mamba_expand", default=2) * config.hidden,
        state=config.number("mamba_d_state", default=16),
        kernel=config.number("mamba_d_conv", default=4),
    )
    return [full(num_full, kv_heads(config), config.head_size), part]


def _mamba2_of(config: ModelConfig, num_layers: int, inner: int | None = None) -> Part:
    """Return Mamba-2 layers with the keys that Bamba, Granite 4 and Falcon-H1 share."""
    heads = config.number("mamba_n_heads", default=128)
    inner = inner or config.number("mamba_expand", default=2) * config.hidden
    own_size = config.values.get("mamba_d_head") not in (None, "auto")
    return _mamba2(
        config,
        num_layers,
        heads=heads,
        head_dim=config.number("mamba_d_head") if own_size else inner // heads,
        state=config.number("mamba_d_state", default=256),
        groups=config.number("mamba_n_groups", default=1),
        kernel=config.number("mamba_d_conv", default=4),
    )


def bamba(config: ModelConfig) -> list[Part]:
    num_full = len(config.indices("attn_layer_indices") or ())
    return [full(num_full, kv_heads(config), config.head_size), _mamba2_of(config, config.layers - num_full)]


def granite_hybrid(config: ModelConfig) -> list[Part]:
    kinds = layer_kinds(config) or [RECURRENT] * config.layers
    num_full = kinds.count(FULL)
    return [full(num_full, kv_heads(config), config.head_size), _mamba2_of(config, kinds.count(RECURRENT))]


def falcon_h1(config: ModelConfig) -> list[Part]:
    """Attention and Mamba-2 side by side in every layer."""
    inner = config.maybe_number("mamba_d_ssm") or config.number("mamba_expand", default=2) * config.hidden
    return [full(config.layers, kv_heads(config), config.head_size), _mamba2_of(config, config.layers, inner)]


def nemotron_h(config: ModelConfig) -> list[Part]:
    """`hybrid_override_pattern`: M is Mamba-2, * attention, - and E feed-forward."""
    pattern = str(config.values.get("hybrid_override_pattern") or "")
    kinds = [] if pattern else layer_kinds(config)
    num_mamba = pattern.count("M") if pattern else kinds.count(RECURRENT)
    num_full = pattern.count("*") if pattern else kinds.count(FULL)
    if not num_mamba + num_full:
        raise UnsupportedError("The config of 'nemotron_h' has no hybrid_override_pattern: its KV cache is not known.")
    part = _mamba2(
        config,
        num_mamba,
        heads=config.number("mamba_num_heads", default=128),
        head_dim=config.number("mamba_head_dim", default=64),
        state=config.number("ssm_state_size", default=128),
        groups=config.number("n_groups", default=8),
        kernel=config.number("conv_kernel", default=4),
    )
    return [full(num_full, kv_heads(config), config.head_size), part]


def zamba2(config: ModelConfig) -> list[Part]:
    """Mamba-2 in every layer; shared attention over twice the width before the layers in `hybrid_layer_ids`."""
    ids = config.indices("hybrid_layer_ids")
    num_full = config.strings("layers_block_type").count("hybrid") if ids is None else len(ids)
    if not num_full:
        raise UnsupportedError("The config of 'zamba2' has no hybrid_layer_ids: its KV cache is not known.")
    size = config.number("attention_head_dim", default=2 * config.hidden // config.heads)
    part = _mamba2(
        config,
        config.layers,
        heads=config.number("n_mamba_heads", default=8),
        head_dim=config.number("mamba_expand", default=2) * config.hidden // config.number("n_mamba_heads", default=8),
        state=config.number("mamba_d_state", default=64),
        groups=config.number("mamba_ngroups", default=1),
        kernel=config.number("mamba_d_conv", default=4),
    )
    return [full(num_full, kv_heads(config), size), part]


def lfm2(config: ModelConfig) -> list[Part]:
    """Short convolutions that keep `conv_L_cache - 1` inputs, and full attention in some layers."""
    kinds = layer_kinds(config)
    full_at = config.indices("full_attn_idxs")
    if not kinds:
        kinds = [FULL if full_at is None or index in full_at else RECURRENT for index in range(config.layers)]
    part = recurrent(
        kinds.count(RECURRENT),
        conv_channels=config.number("conv_dim", default=config.hidden),
        conv_kernel=config.number("conv_L_cache", default=3),
        conv_bytes=element_bytes(config.dtype),
        state_bytes=0,
    )
    return [full(kinds.count(FULL), kv_heads(config), config.head_size), part]


def minimax(config: ModelConfig) -> list[Part]:
    """MiniMax-Text-01 and M1: lightning attention with a state of one matrix a head, full attention in some layers."""
    kinds = layer_kinds(config)
    if not kinds:
        kinds = [FULL if flag else RECURRENT for flag in config.numbers("attn_type_list") or []]
    if not kinds:
        raise UnsupportedError(f"The config of {config.model_type!r} has no attn_type_list: its KV cache is not known.")
    state = product(config.heads, config.head_size, config.head_size, _state_bytes(config))
    part = Part(kind="recurrent", num_layers=kinds.count(RECURRENT), state_bytes=state)
    return [full(kinds.count(FULL), kv_heads(config), config.head_size), part]


def recurrent_gemma(config: ModelConfig) -> list[Part]:
    """`block_types` repeats; the attention slides, the RG-LRU keeps a float32 vector."""
    pattern = config.strings("block_types") or config.strings("_block_types") or ["recurrent", "recurrent", "attention"]
    kinds = [pattern[index % len(pattern)] for index in range(config.layers)]
    width = config.maybe_number("lru_width") or config.hidden
    part = recurrent(
        kinds.count("recurrent"),
        conv_channels=width,
        conv_kernel=config.number("conv1d_width", default=4),
        conv_bytes=element_bytes(config.dtype),
        state_bytes=4 * width,
    )
    window = config.number("attention_window_size", default=2048)
    return [windowed(kinds.count("attention"), kv_heads(config), config.head_size, window), part]
