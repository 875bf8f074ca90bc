"""What the bytes of vLLM's KV tensors mean, read from shape and strides rather than from a name.

The same name means different bytes in different versions ("NHD" keeps K apart from V in 0.25 and interleaves them per
token and head in 0.31), and the CPU packs K and V for its instruction set. So the fingerprint carries the order of the
dimensions inside a block with their sizes, and the attention backend that writes them.

What a layer must be: its blocks lie one behind the other, each one run of bytes. That holds for the layouts with the
layer outermost and the block next (0.31: LBHNC, the CPU's only one, and LBNHC, the default on CUDA; 0.25: blocks first
with K and V inside; MLA: [block, token, latent]). Others are refused at start.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tollbridge.errors import StartupError
from tollbridge.vllm.blocks import Region

_DIMENSIONS = {
    3: ("block", "token", "latent"),
    4: ("block", "head", "token", "content"),
    5: ("block", "kv", "token", "head", "content"),
}


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """The KV cache of one worker process."""

    layers: Mapping[str, int]  # layer name -> index; layers that share a cache share the index
    regions: tuple[Region, ...]  # by index
    tensors: tuple[Any, ...]  # the same as vLLM registered them, by index
    num_blocks: int
    block_bytes: int  # of one layer
    description: str
    dtype: str
    num_kv_heads: int
    device: str


def read_layout(kv_caches: Mapping[str, Any], *, num_blocks: int, backend: str) -> CacheLayout:
    """Return the layout of the tensors that vLLM registered; StartupError when blocks are no runs of bytes."""
    if not kv_caches:
        raise StartupError("vLLM registered no KV cache, so there is nothing to send or load.")
    names = sorted(kv_caches, key=_natural)
    addresses: dict[int, int] = {}
    layers = {name: addresses.setdefault(kv_caches[name].data_ptr(), len(addresses)) for name in names}
    owners = {layers[name]: kv_caches[name] for name in reversed(names)}
    descriptions = {_describe(names[0], tensor, num_blocks) for tensor in owners.values()}
    if len(descriptions) != 1:
        raise StartupError(f"The layers' KV caches differ in layout: {'; '.join(sorted(descriptions))}.")
    first = owners[0]
    num_bytes = first.numel() * first.element_size()
    return CacheLayout(
        layers=layers,
        regions=tuple(Region(owners[index].data_ptr(), num_bytes) for index in range(len(owners))),
        tensors=tuple(owners[index] for index in range(len(owners))),
        num_blocks=num_blocks,
        block_bytes=num_bytes // num_blocks,
        description=f"{backend}:{descriptions.pop()}",
        dtype=str(first.dtype).removeprefix("torch."),
        num_kv_heads=_size(first, "head"),
        device=first.device.type,
    )


def _describe(name: str, tensor: Any, num_blocks: int) -> str:
    """Return the dimensions inside a block, slowest first, with their sizes."""
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    problem = _problem(shape, strides, num_blocks)
    if problem is not None:
        raise StartupError(
            f"The KV cache of layer {name} has shape {list(shape)} and strides {list(strides)}: {problem}; "
            "leave VLLM_KV_CACHE_LAYOUT unset."
        )
    inner = list(zip(_DIMENSIONS[len(shape)], shape, strides, strict=True))[1:]
    inner.sort(key=lambda dimension: -dimension[2])
    order = ",".join(f"{what}={size}" for what, size, _ in inner)
    return f"{order},kernel_blocks={shape[0] // num_blocks},dtype={tensor.dtype}"


def _problem(shape: tuple[int, ...], strides: tuple[int, ...], num_blocks: int) -> str | None:
    if len(shape) not in _DIMENSIONS:
        return f"{len(shape)} dimensions are not known"
    if shape[0] % num_blocks:
        return f"its first dimension does not hold {num_blocks} blocks"
    expected = 1
    for size, stride in sorted(zip(shape[1:], strides[1:], strict=True), key=lambda pair: (pair[1], pair[0])):
        if size > 1 and stride != expected:
            return "a block is not one run of bytes"
        expected *= size
    return None if strides[0] == expected else "the blocks do not lie one behind the other"


def _size(tensor: Any, what: str) -> int:
    """Return the size of a dimension, 1 when the layout has no such dimension (MLA)."""
    dimensions = _DIMENSIONS[len(tensor.shape)]
    return int(tensor.shape[dimensions.index(what)]) if what in dimensions else 1


def _natural(name: str) -> list[int | str]:
    """Sort key: layer 10 after layer 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
