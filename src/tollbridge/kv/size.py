"""Bytes of KV cache that a model needs per token."""

from __future__ import annotations


def kv_bytes_per_token(*, num_layers: int, num_kv_heads: int, head_size: int, dtype_bytes: float) -> float:
    """Return bytes of K and V of one token in all layers, for full attention with grouped KV heads.

    `dtype_bytes` may be fractional (packed formats). Multi-query and multi-head attention are the ends of the same
    formula; latent attention, sliding windows and hybrid layers are not described by it.
    """
    return 2 * num_layers * num_kv_heads * head_size * dtype_bytes
