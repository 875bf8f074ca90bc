"""Published inequalities, to compare with."""

from __future__ import annotations


def mooncake_bandwidth(
    *, num_tokens: int, hidden_size: int, gqa: int, flops: float, dtype_bytes: int = 2, a: float = 4.0, b: float = 22.0
) -> float:
    """Return the bytes per second from which moving the KV of `num_tokens` beats recomputing it.

    B / G > 2 d s / (gqa (a p d + b d^2)): Mooncake (Qin et al., 2024), with p tokens, hidden size d, G the FLOP/s of
    the node, gqa query heads per KV head; 6 GB/s for LLaMA3-70B at 8,192 tokens on 8 A800, 19 on 8 H800.
    """
    d, p = hidden_size, num_tokens
    return flops * 2 * d * dtype_bytes / (gqa * (a * p * d + b * d * d))
