"""Decode steps of fixed shapes, which a GPU replays as CUDA graphs: no launch by Python, no gap between two kernels.

A step in which every sequence adds one token is padded to a class: the next power of two of rows and of blocks per row.
All that changes from step to step is one small matrix of ids: per row its token, its position, its block table. Slots
and mask are computed from it on the device, inside the graph, so a step costs one copy to the GPU and one launch.

Padding rows are copies of the first row: they write the same bytes to the same slot. Padding blocks are block 0, whose
slots are replaced by the row's own first token, as in `attention.py`.

Nothing here is about CUDA but `_capture`: on a CPU the same code runs without graphs, and that is how tests compare it.
A graph is captured when its class first comes up, which takes about a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tollbridge.engine.attention import STEP, DecodeGroup, Keys, StepContext
from tollbridge.engine.cache import PagedKVCache
from tollbridge.engine.model import LoadedModel
from tollbridge.sched.plan import SequenceChunk

MIN_BLOCKS = 16  # per row: shorter contexts share a class
_NUM_COLUMNS = 2  # token and position, in front of the block table

Replay = Callable[[], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class FixedStatistics:
    """Counters since start."""

    steps_total: int
    classes_total: int  # shapes that came up; on a GPU each is a graph


class FixedDecoder:
    """Runs decode steps by class. Called from one thread."""

    def __init__(self, model: LoadedModel, cache: PagedKVCache, *, max_rows: int) -> None:
        self._model = model
        self._cache = cache
        self._max_rows = max_rows
        self._max_blocks = cache.num_blocks
        self._classes: dict[tuple[int, int], _Class] = {}
        self._pool: Any = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None
        self._steps_total = 0

    def takes(self, chunks: Sequence[SequenceChunk]) -> bool:
        """Whether every chunk is one token whose logits are wanted."""
        return len(chunks) <= self._max_rows and all(
            len(chunk.token_ids) == 1 and chunk.needs_logits for chunk in chunks
        )

    def run(self, chunks: Sequence[SequenceChunk]) -> torch.Tensor:
        """Compute one token of each sequence; return float32 logits `[len(chunks), vocab_size]`.

        They are overwritten by the next step of the same class.
        """
        num_blocks = max(chunk.first_token // self._cache.block_size + 1 for chunk in chunks)
        shape = _round_up(len(chunks), 1), min(_round_up(num_blocks, MIN_BLOCKS), self._max_blocks)
        found = self._classes.get(shape)
        if found is None:
            found = self._classes[shape] = _Class(self._model, self._cache, *shape)
        found.fill(chunks)
        if found.replay is None:
            found.replay = _capture(found.compute, self._pool) if self._pool is not None else found.compute
        self._steps_total += 1
        return found.replay()[: len(chunks)]

    def statistics(self) -> FixedStatistics:
        return FixedStatistics(steps_total=self._steps_total, classes_total=len(self._classes))


class _Class:
    """The step for `num_rows` sequences of at most `num_blocks` blocks, and its input."""

    def __init__(self, model: LoadedModel, cache: PagedKVCache, num_rows: int, num_blocks: int) -> None:
        device = model.device
        self._model = model
        self._cache = cache
        shape = (num_rows, _NUM_COLUMNS + num_blocks)
        self._staged = torch.zeros(shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._host = self._staged.numpy()
        self._input = torch.zeros(shape, dtype=torch.int64, device=device)
        self._rows = torch.arange(num_rows, device=device)
        self._in_block = torch.arange(cache.block_size, device=device)
        self._places = torch.arange(num_blocks * cache.block_size, device=device)
        self.replay: Replay | None = None

    def fill(self, chunks: Sequence[SequenceChunk]) -> None:
        """Bring a step's ids to the device. The last step has been read by now, so its input may be overwritten."""
        host, size = self._host, self._cache.block_size
        for line, chunk in zip(host, chunks, strict=False):
            num_blocks = chunk.first_token // size + 1
            line[0], line[1] = chunk.token_ids[0], chunk.first_token
            line[_NUM_COLUMNS : _NUM_COLUMNS + num_blocks] = chunk.block_table[:num_blocks]
            line[_NUM_COLUMNS + num_blocks :] = 0
        host[len(chunks) :] = host[0]
        self._input.copy_(self._staged, non_blocking=True)

    def compute(self) -> torch.Tensor:
        """Run the model on the input; return float32 logits `[num_rows, vocab_size]`."""
        token_ids, positions, tables = self._input[:, 0], self._input[:, 1], self._input[:, _NUM_COLUMNS:]
        slots = (tables[:, :, None] * self._cache.block_size + self._in_block).flatten(1)  # [num_rows, num_tokens]
        new_slots = slots.gather(1, positions[:, None])[:, 0]
        visible = self._places <= positions[:, None]
        slots = torch.where(visible, slots, slots[:, :1])
        mask = torch.zeros(visible.shape, dtype=self._cache.shape.dtype, device=visible.device)
        mask.masked_fill_(~visible, float("-inf"))
        keys = Keys(len(slots), slots.shape[1], 0, slots.flatten())
        group = DecodeGroup(self._rows, keys, mask[:, None, None, :])
        step = StepContext(self._cache, new_slots, [group], _no_hook)
        out = self._model.module(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=0, **{STEP: step}
        )
        logits: torch.Tensor = out.logits[0]
        return logits.float()


def _capture(compute: Replay, pool: Any) -> Replay:
    """Record `compute` as a CUDA graph; return what replays it and hands out its output.

    Other threads go on using the GPU meanwhile, hence "thread_local". The run in front of it makes the libraries
    allocate what they need, which a capture must not do.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        compute()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        output = compute()

    def replay() -> torch.Tensor:
        graph.replay()
        return output

    return replay


def _round_up(value: int, least: int) -> int:
    """Return the least power of two that is at least `value` and `least`."""
    return max(1 << (value - 1).bit_length(), least)


def _no_hook(layer: int) -> None:
    """Layers are told of when the whole step has been issued."""
