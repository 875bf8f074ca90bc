"""What is read from the KV tensors that the supported vLLM versions register."""

from __future__ import annotations

import pytest
import torch

from tollbridge.errors import StartupError
from tollbridge.vllm.layout import CacheLayout, read_layout

BLOCKS, HEADS, TOKENS, SIZE = 6, 2, 8, 4


def layers(tensor: torch.Tensor, count: int = 3) -> dict[str, torch.Tensor]:
    """Place `count` caches like `tensor` behind each other in one allocation, as vLLM 0.31 does."""
    buffer = torch.zeros(count * tensor.numel(), dtype=tensor.dtype)
    return {
        f"model.layers.{index}.self_attn.attn": buffer.as_strided(tensor.shape, tensor.stride(), index * tensor.numel())
        for index in reversed(range(count))
    }


def read(tensor: torch.Tensor, *, num_blocks: int = BLOCKS) -> CacheLayout:
    return read_layout(layers(tensor), num_blocks=num_blocks, backend="B")


HEAD_MAJOR = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * SIZE)  # 0.31 LBHNC: the CPU
TOKEN_MAJOR = torch.zeros(BLOCKS, TOKENS, HEADS, 2 * SIZE).transpose(1, 2)  # 0.31 LBNHC: CUDA
OLD = torch.zeros(BLOCKS, 2, TOKENS, HEADS, SIZE)  # 0.25 FlashAttention
LATENT = torch.zeros(BLOCKS, TOKENS, 10)  # MLA


@pytest.mark.parametrize("tensor", [HEAD_MAJOR, TOKEN_MAJOR, OLD, LATENT], ids=["lbhnc", "lbnhc", "0.25", "mla"])
def test_supported(tensor: torch.Tensor) -> None:
    layout = read(tensor)
    assert layout.block_bytes == tensor.numel() * 4 // BLOCKS
    assert list(layout.layers.values()) == [0, 1, 2]
    assert list(layout.layers) == sorted(layout.layers)
    gaps = {right.address - left.address for left, right in zip(layout.regions, layout.regions[1:], strict=False)}
    assert gaps == {layout.block_bytes * BLOCKS}


def test_the_order_of_bytes_is_told_apart() -> None:
    descriptions = {read(tensor).description for tensor in (HEAD_MAJOR, TOKEN_MAJOR, OLD, LATENT)}
    assert len(descriptions) == 4
    assert read(HEAD_MAJOR).description == "B:head=2,token=8,content=8,kernel_blocks=1,dtype=torch.float32"
    assert read(HEAD_MAJOR.to(torch.float16)).description != read(HEAD_MAJOR).description


def test_kernel_blocks_smaller_than_the_managers() -> None:
    layout = read(HEAD_MAJOR, num_blocks=3)
    assert layout.block_bytes == HEAD_MAJOR.numel() * 4 // 3
    assert "kernel_blocks=2" in layout.description


def test_heads() -> None:
    assert [read(tensor).num_kv_heads for tensor in (HEAD_MAJOR, OLD, LATENT)] == [2, 2, 1]


def test_layers_that_share_a_cache() -> None:
    caches = layers(HEAD_MAJOR, 2)
    caches["model.layers.10.self_attn.attn"] = caches["model.layers.1.self_attn.attn"]
    layout = read_layout(caches, num_blocks=BLOCKS, backend="B")
    assert layout.layers["model.layers.10.self_attn.attn"] == layout.layers["model.layers.1.self_attn.attn"] == 1
    assert len(layout.regions) == 2


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (torch.zeros(2, BLOCKS, TOKENS, HEADS, SIZE).transpose(0, 1), "not one run"),  # K of all blocks, then V
        (torch.zeros(BLOCKS, 3, HEADS, TOKENS, SIZE)[:, 0], "behind the other"),  # layers inside the block
        (torch.zeros(HEADS, BLOCKS, TOKENS, SIZE).transpose(0, 1), "not one run"),
        (torch.zeros(BLOCKS, TOKENS), "dimensions"),
        (torch.zeros(BLOCKS + 1, HEADS, TOKENS, SIZE), "does not hold"),
    ],
)
def test_refused(tensor: torch.Tensor, what: str) -> None:
    with pytest.raises(StartupError, match=what):
        read_layout({"layers.0": tensor}, num_blocks=BLOCKS, backend="B")


def test_layers_that_differ() -> None:
    with pytest.raises(StartupError, match="differ"):
        read_layout({"layers.0": HEAD_MAJOR, "layers.1": LATENT}, num_blocks=BLOCKS, backend="B")


def test_no_cache() -> None:
    with pytest.raises(StartupError, match="no KV cache"):
        read_layout({}, num_blocks=BLOCKS, backend="B")
