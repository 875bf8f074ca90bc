"""Attention over the paged KV cache, plugged into transformers' models through their attention interface.

The runner flattens a step into one row of tokens, `[1, num_tokens]`, whatever mix of prefill chunks and decodes it is.
Projections, MLPs and norms do not care about sequences; only attention does, and it reads its `StepContext`, which the
runner builds once per step and passes as a keyword argument through the model's forward. In each layer:

  1. the new K and V are written to the cache, at `slot_mapping`;
  2. `on_layer(layer)` says so, before attention is computed: a transfer may ship this layer meanwhile;
  3. every `Group` gathers its keys from the cache and attends.

Groups. A prefill chunk is a group of its own, causal with the offset of its first token. Decodes (one token each) are
batched by context length, padded to at most twice their size. Padding points at the sequence's own first token, never
at memory nobody wrote: a masked weight is 0, but 0 x NaN is NaN, and the bytes of a failed transfer may be anything.
With grouped queries, the heads that share a KV head are folded into the query length, so that KV is never repeated.
A context that lies in one run of blocks is read in place; others are copied together (the copy costs as much as the
attention itself, both being bound by memory).

Rejected: one call per sequence always (slow for many short contexts), one padded call for all (one long context makes
all long), splitting a chunk into context and self parts merged by log-sum-exp (no faster: the CPU kernel does not skip
the upper triangle).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from tollbridge.engine.cache import PagedKVCache
from tollbridge.errors import UnsupportedError
from tollbridge.sched.plan import SequenceChunk, StepPlan

IMPLEMENTATION = "tollbridge_paged"
STEP = "tollbridge_step"  # the keyword argument that carries the StepContext through the model's forward
MIN_TOKENS_IN_PLACE = 512  # a shorter decode context gains more from being batched than from not being copied

# What a model may pass to attention that changes its result, and that is not implemented here.
REFUSED_ARGUMENTS = {
    "sliding_window": "sliding-window attention",
    "softcap": "attention logit soft-capping",
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
    "attention_chunk_size": "chunked attention",
}

Slots = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Keys:
    """Where `num_rows` contexts, padded to `num_tokens`, lie in a layer of the cache."""

    num_rows: int
    num_tokens: int
    first_slot: int  # when in place
    slots: torch.Tensor | None  # [num_rows * num_tokens], or None: in place, one row

    def read(self, layer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V, each `[num_rows, num_kv_heads, num_tokens, head_dim]`, strided views of one buffer."""
        if self.slots is None:
            kv = layer[self.first_slot : self.first_slot + self.num_tokens]
        else:
            kv = layer.index_select(0, self.slots)
        kv = kv.view(self.num_rows, self.num_tokens, *layer.shape[1:]).permute(2, 0, 3, 1, 4)
        return kv[0], kv[1]


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences that add one token each."""

    rows: torch.Tensor  # [num_rows], their places in the flattened step
    keys: Keys
    mask: torch.Tensor | None  # [num_rows, 1, 1, num_tokens], added to the scores

    def attend(self, query: torch.Tensor, layer: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Return `[num_rows, num_heads, head_dim]` for `query` `[1, num_heads, num_tokens, head_dim]`."""
        key, value = self.keys.read(layer)
        num_rows, num_kv_heads, _, head_dim = key.shape
        picked = query[0].index_select(1, self.rows).transpose(0, 1)  # [num_rows, num_heads, head_dim]
        folded = picked.reshape(num_rows, num_kv_heads, -1, head_dim)  # queries of a KV head as its query length
        out = functional.scaled_dot_product_attention(folded, key, value, attn_mask=self.mask, scale=scale)
        return out.reshape(num_rows, -1, head_dim)


@dataclass(frozen=True, slots=True)
class PrefillGroup:
    """A chunk of several tokens of one sequence."""

    rows: slice
    keys: Keys
    mask: torch.Tensor | None  # [num_rows, num_tokens], added to the scores; None: plain causal, no earlier context

    def attend(self, query: torch.Tensor, layer: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Return `[num_rows, num_heads, head_dim]` for `query` `[1, num_heads, num_tokens, head_dim]`."""
        key, value = self.keys.read(layer)
        out = functional.scaled_dot_product_attention(
            query[:, :, self.rows],
            key,
            value,
            attn_mask=self.mask,
            is_causal=self.mask is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out[0].transpose(0, 1)


@dataclass(slots=True)
class StepContext:
    """What attention needs to know of a step; built once, read by every layer."""

    cache: PagedKVCache
    slot_mapping: torch.Tensor  # [num_tokens], where each token's KV goes
    groups: Sequence[DecodeGroup | PrefillGroup]
    on_layer: Callable[[int], None]
    num_layers_done: int = 0


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Write this layer's K and V, report them, attend; the signature is transformers' attention interface."""
    step = kwargs.get(STEP)
    assert isinstance(step, StepContext), "the model was called without the engine's runner"
    _refuse(kwargs)
    layer: int = module.layer_idx  # type: ignore[assignment]  # torch types attributes of modules as tensors
    step.cache.write(layer, step.slot_mapping, key[0].transpose(0, 1), value[0].transpose(0, 1))
    step.on_layer(layer)
    step.num_layers_done += 1
    memory = step.cache.layers[layer]
    if len(step.groups) == 1:
        return step.groups[0].attend(query, memory, scaling).unsqueeze(0), None
    out = query.new_empty(query.shape[2], query.shape[1], query.shape[3])  # [num_tokens, num_heads, head_dim]
    for group in step.groups:
        out[group.rows] = group.attend(query, memory, scaling)
    return out.unsqueeze(0), None


def register() -> None:
    """Make `IMPLEMENTATION` known to transformers. No mask function goes with it, so models build no mask."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, paged_attention)


def build_step(plan: StepPlan, cache: PagedKVCache, on_layer: Callable[[int], None]) -> StepContext:
    """Lay out a step: slots of the new tokens, and the groups in which they attend."""
    builder = _StepBuilder(cache)
    for chunk in plan.chunks:
        builder.add(chunk)
    return builder.build(on_layer)


class _StepBuilder:
    """Collects chunks; decodes are grouped when all are known."""

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache
        self._device = cache.tensor.device
        self._num_tokens = 0
        self._new_slots: list[Slots] = []
        self._groups: list[DecodeGroup | PrefillGroup] = []
        self._decodes: dict[int, list[tuple[int, Slots]]] = defaultdict(list)  # size class -> (row, context slots)

    def add(self, chunk: SequenceChunk) -> None:
        num_new = len(chunk.token_ids)
        slots = _slots(chunk.block_table, chunk.first_token + num_new, self._cache.block_size)
        self._new_slots.append(slots[chunk.first_token :])
        row = self._num_tokens
        self._num_tokens += num_new
        if num_new > 1:
            mask = self._chunk_mask(chunk.first_token, num_new) if chunk.first_token else None
            self._groups.append(PrefillGroup(slice(row, row + num_new), self._keys(slots), mask))
        elif self._device.type == "cpu" and len(slots) >= MIN_TOKENS_IN_PLACE and _is_run(slots):
            self._groups.append(DecodeGroup(self._indices(np.array([row])), self._keys(slots), None))
        else:
            self._decodes[len(slots).bit_length()].append((row, slots))

    def build(self, on_layer: Callable[[int], None]) -> StepContext:
        groups = self._groups + [self._decode_group(members) for members in self._decodes.values()]
        return StepContext(self._cache, self._indices(np.concatenate(self._new_slots)), groups, on_layer)

    def _decode_group(self, members: list[tuple[int, Slots]]) -> DecodeGroup:
        rows = self._indices(np.array([row for row, _ in members]))
        lengths = np.array([len(slots) for _, slots in members])
        longest = int(lengths.max())
        padded = np.empty((len(members), longest), dtype=np.int64)
        for line, (_, slots) in zip(padded, members, strict=True):
            line[: len(slots)] = slots
            line[len(slots) :] = slots[0]  # padding: the sequence's own first token
        keys = Keys(len(members), longest, 0, self._indices(padded.reshape(-1)))
        if lengths.min() == longest:
            return DecodeGroup(rows, keys, None)
        visible = torch.from_numpy(np.arange(longest) < lengths[:, None])
        return DecodeGroup(rows, keys, self._additive(visible)[:, None, None, :])

    def _chunk_mask(self, first_token: int, num_new: int) -> torch.Tensor:
        """Return `[num_new, first_token + num_new]`: token i of the chunk sees everything up to itself."""
        positions = torch.arange(first_token, first_token + num_new)
        return self._additive(torch.arange(first_token + num_new) <= positions[:, None])

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        """Turn a boolean mask into scores once per step; the kernel would do it in every layer."""
        mask = torch.zeros(visible.shape, dtype=self._cache.shape.dtype).masked_fill_(~visible, float("-inf"))
        return mask.to(self._device)

    def _keys(self, slots: Slots) -> Keys:
        """Return the keys of one sequence."""
        if _is_run(slots):
            return Keys(1, len(slots), int(slots[0]), None)
        return Keys(1, len(slots), 0, self._indices(slots))

    def _indices(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def _slots(block_table: Sequence[int], num_tokens: int, block_size: int) -> Slots:
    """Return the slots of tokens [0, num_tokens)."""
    num_blocks = -(-num_tokens // block_size)
    blocks = np.array(block_table[:num_blocks], dtype=np.int64)
    if len(blocks) < num_blocks:
        raise IndexError(f"a table of {len(blocks)} blocks of {block_size} does not cover {num_tokens} tokens")
    return (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)[:num_tokens]


def _is_run(slots: Slots) -> bool:
    """Return whether the slots are neighbours, in order."""
    return bool(slots[-1] - slots[0] == len(slots) - 1 and (np.diff(slots) == 1).all())


def _refuse(kwargs: dict[str, object]) -> None:
    for name, feature in REFUSED_ARGUMENTS.items():
        if kwargs.get(name) is not None:
            raise UnsupportedError(f"The model uses {feature} ({name}), which the embedded engine does not compute.")
