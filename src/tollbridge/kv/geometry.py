"""How much KV a model keeps for a sequence: a sum of parts, each growing in its own way.

A *part* is a set of layers alike. Full and latent attention keep every token, sliding and chunked attention at most a
window of them, recurrent layers (Mamba, linear attention, short convolutions) a state of fixed size. What a split ships
for a prompt of n tokens is `bytes_at(n)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import msgspec

KVDtype = Literal["float32", "bfloat16", "float16", "fp8", "int8"]

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """`num_layers` layers that each keep `elements` numbers a token, or `state_bytes` a sequence, or both."""

    kind: str  # "full", "sliding", "chunked", "latent", "indexer", "recurrent"
    num_layers: int
    elements: int = 0  # KV elements per token and layer
    window: int | None = None  # tokens kept at most; None: all
    state_bytes: int = 0  # per sequence and layer, whatever its length
    bytes_per_element: int | None = None  # None: that of the KV cache's dtype

    def bytes_per_token(self, dtype_bytes: int) -> int:
        """Return bytes per token, all layers of the part together, while the window is not full."""
        return self.num_layers * self.elements * (self.bytes_per_element or dtype_bytes)

    def tokens_kept(self, num_tokens: int) -> int:
        return num_tokens if self.window is None else min(num_tokens, self.window)


class KVGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache of one model under one dtype. All sizes are of one whole model, summed over tensor-parallel ranks.

    Latent attention (MLA) is replicated on every rank and counted once, since it need be sent once.
    """

    model_type: str
    dtype: KVDtype
    parts: tuple[Part, ...]
    notes: tuple[str, ...] = ()  # what a person should know about this figure

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token of all layers, as long as no window is full."""
        return self._sum(lambda part: part.bytes_per_token(DTYPE_BYTES[self.dtype]))

    @property
    def bytes_per_token_long(self) -> int:
        """Bytes that one more token adds when every window is full."""
        return self._sum(lambda part: 0 if part.window else part.bytes_per_token(DTYPE_BYTES[self.dtype]))

    @property
    def fixed_bytes(self) -> int:
        """Bytes of recurrent state per sequence."""
        return self._sum(lambda part: part.num_layers * part.state_bytes)

    @property
    def windows(self) -> tuple[int, ...]:
        """The windows of sliding and chunked layers, each once, smallest first."""
        return tuple(sorted({part.window for part in self.parts if part.window}))

    @property
    def num_layers(self) -> int:
        """Layers that keep anything per token."""
        return self._sum(lambda part: part.num_layers if part.elements and part.kind != "indexer" else 0)

    def bytes_at(self, num_tokens: int) -> int:
        """Return the bytes kept after `num_tokens` tokens."""
        size = DTYPE_BYTES[self.dtype]
        return self.fixed_bytes + self._sum(lambda part: part.bytes_per_token(size) * part.tokens_kept(num_tokens))

    def _sum(self, number: Callable[[Part], int]) -> int:
        return sum(map(number, self.parts))


def full(num_layers: int, num_kv_heads: int, head_size: int, value_size: int | None = None) -> Part:
    """Return layers that keep K and V of every token; `value_size` where V's heads differ from K's."""
    return Part(kind="full", num_layers=num_layers, elements=_pair(num_kv_heads, head_size, value_size))


def windowed(
    num_layers: int, num_kv_heads: int, head_size: int, window: int, kind: Literal["sliding", "chunked"] = "sliding"
) -> Part:
    """Return layers that keep K and V of the last `window` tokens."""
    return Part(kind=kind, num_layers=num_layers, elements=_pair(num_kv_heads, head_size, None), window=window)


def latent(num_layers: int, kv_lora_rank: int, qk_rope_head_dim: int) -> Part:
    """Return layers of multi-head latent attention: one compressed vector and one rotary key a token (DeepSeek-V2)."""
    return Part(kind="latent", num_layers=num_layers, elements=kv_lora_rank + qk_rope_head_dim)


def recurrent(num_layers: int, *, conv_channels: int, conv_kernel: int, conv_bytes: int, state_bytes: int) -> Part:
    """Return layers with a state: a convolution's last `conv_kernel - 1` inputs, and a recurrent one."""
    conv = conv_channels * max(conv_kernel - 1, 0) * conv_bytes
    return Part(kind="recurrent", num_layers=num_layers, state_bytes=conv + state_bytes)


def element_bytes(dtype: str) -> int:
    """Return the bytes of one element of a dtype as configs spell it ("torch.bfloat16", "float32", ...)."""
    return DTYPE_BYTES.get(dtype.removeprefix("torch."), 2)


def product(*factors: int) -> int:
    return math.prod(factors)


def _pair(num_kv_heads: int, head_size: int, value_size: int | None) -> int:
    return num_kv_heads * (head_size + (head_size if value_size is None else value_size))
