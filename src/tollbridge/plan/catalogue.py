"""Speeds of GPUs nobody here has measured: from data sheets, with their uncertainty. A measurement is always better.

Prefill is bound by arithmetic: T per token = 2 x active parameters / (dense 16-bit FLOP/s x efficiency). Decode reads
the weights once a step: step = weight bytes / (memory bandwidth x efficiency). The intervals are rules of thumb: the
one measurement behind them here is 67 to 76 us a token for Qwen2.5-7B on an L40S, an efficiency of 0.51 to 0.58.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from tollbridge.errors import ConfigError, UnsupportedError
from tollbridge.kv.geometry import DTYPE_BYTES
from tollbridge.kv.modelconfig import ModelConfig

PREFILL_EFFICIENCY = (0.35, 0.65)
DECODE_EFFICIENCY = (0.55, 0.85)


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """Dense 16-bit FLOP/s with 32-bit accumulation, and memory bandwidth in bytes/s, of the vendor's data sheet."""

    flops: float
    bytes_per_s: float


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "L4": Gpu(flops=121e12, bytes_per_s=300e9),
        "L40S": Gpu(flops=362e12, bytes_per_s=864e9),
        "A10": Gpu(flops=125e12, bytes_per_s=600e9),
        "A100-80GB": Gpu(flops=312e12, bytes_per_s=2039e9),
        "H100-SXM": Gpu(flops=989e12, bytes_per_s=3350e9),
        "H100-PCIe": Gpu(flops=756e12, bytes_per_s=2000e9),
        "H200": Gpu(flops=989e12, bytes_per_s=4800e9),
        "B200": Gpu(flops=2250e12, bytes_per_s=8000e9),
        "RTX-3090": Gpu(flops=71e12, bytes_per_s=936e9),
        "RTX-4090": Gpu(flops=165e12, bytes_per_s=1008e9),
        "MI300X": Gpu(flops=1307e12, bytes_per_s=5300e9),
    }
)


class Guess(msgspec.Struct, frozen=True, kw_only=True):
    """Middle values, and how far the ends of the interval are from them, relative."""

    per_token_s: float
    step_s: float
    uncertainty: float


def guess(gpu: str, model: Mapping[str, Any]) -> Guess:
    """Return the speed of `model` on one `gpu`; ConfigError for an unknown GPU, UnsupportedError for a model."""
    found = next((value for name, value in GPUS.items() if name.lower() == gpu.lower()), None)
    if found is None:
        raise ConfigError(f"The GPU {gpu!r} is not in the catalogue: use {', '.join(GPUS)}, or measure.", param="gpu")
    active, total = parameters(model)
    low, high = PREFILL_EFFICIENCY
    middle, decode = (low + high) / 2, sum(DECODE_EFFICIENCY) / 2
    dtype_bytes = DTYPE_BYTES.get(ModelConfig(model).dtype, 2)
    return Guess(
        per_token_s=2 * active / (found.flops * middle),
        step_s=total * dtype_bytes / (found.bytes_per_s * decode),
        uncertainty=(high - low) / (high + low),
    )


def parameters(model: Mapping[str, Any]) -> tuple[float, float]:
    """Return (parameters that one token passes, all parameters) of a transformer, from its config, without embeddings
    in the first. Raises UnsupportedError when its feed-forward part is not known."""
    config = ModelConfig(model)
    hidden, layers, heads = config.hidden, config.layers, config.heads
    size = config.head_size
    kv_heads = config.maybe_number("num_key_value_heads", "num_kv_heads") or heads
    attention = hidden * size * (2 * heads + 2 * kv_heads)
    inner = config.maybe_number("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size") or 0
    experts = config.maybe_number("num_experts", "num_local_experts", "n_routed_experts")
    if experts is None:
        if not inner:
            raise UnsupportedError(
                f"The config of {config.model_type!r} has no intermediate_size: give measured prefill."
            )
        active = every = 3 * hidden * inner
    else:
        width = config.maybe_number("moe_intermediate_size") or inner
        used = config.number("num_experts_per_tok", "num_experts_per_token", default=2)
        shared = (config.maybe_number("n_shared_experts") or 0) * width
        active = 3 * hidden * (used * width + shared)
        every = 3 * hidden * (experts * width + shared)
    vocabulary = config.number("vocab_size", default=32_000) * hidden
    return layers * (attention + active) + vocabulary, layers * (attention + every) + 2 * vocabulary
