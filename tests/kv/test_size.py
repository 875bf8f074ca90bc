from __future__ import annotations

import pytest

from tollbridge.kv.size import kv_bytes_per_token


@pytest.mark.parametrize(
    ("layers", "heads", "size", "dtype_bytes", "expected"),
    [
        (32, 8, 128, 2, 131_072),  # Llama 3.1 8B in bf16: 128 KiB
        (80, 8, 128, 2, 327_680),  # Llama 3.1 70B
        (30, 3, 64, 4, 46_080),  # SmolLM2 135M in float32
        (32, 8, 128, 1, 65_536),  # fp8
    ],
)
def test_known_models(layers: int, heads: int, size: int, dtype_bytes: int, expected: int) -> None:
    assert (
        kv_bytes_per_token(num_layers=layers, num_kv_heads=heads, head_size=size, dtype_bytes=dtype_bytes) == expected
    )
