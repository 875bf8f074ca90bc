"""A loop of a few lines around the runner: what the engine's core does, without its scheduler, cache and threads."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tollbridge.engine.cache import KVShape, PagedKVCache
from tollbridge.engine.model import LoadedModel, load_model
from tollbridge.engine.runner import ModelRunner
from tollbridge.sched.plan import SequenceChunk, StepPlan

torch.set_num_threads(1)


@dataclass
class Bench:
    """A model with its cache and runner."""

    model: LoadedModel
    cache: PagedKVCache
    runner: ModelRunner


@dataclass
class Sequence:
    token_ids: list[int]
    block_table: list[int]
    num_computed: int = 0
    generated: list[int] = field(default_factory=list)

    def chunk(self, size: int) -> SequenceChunk:
        part = self.token_ids[self.num_computed : self.num_computed + size]
        return SequenceChunk(
            request_id="test",
            token_ids=part,
            first_token=self.num_computed,
            block_table=self.block_table,
            needs_logits=self.num_computed + len(part) == len(self.token_ids),
        )


def make_bench(folder: Path, *, num_blocks: int = 256, block_size: int = 16, dtype: str = "float32") -> Bench:
    """Load a model; its cache starts full of NaN, so that reading a slot nobody wrote spoils the result."""
    model = load_model(folder, name=folder.name, dtype=dtype)
    shape = KVShape(
        num_layers=model.num_layers,
        block_size=block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=model.dtype,
    )
    cache = PagedKVCache(shape, num_blocks=num_blocks, device=model.device)
    runner = ModelRunner(model, cache)
    runner.warm_up()
    cache.tensor.fill_(float("nan"))
    return Bench(model, cache, runner)


def make_sequences(bench: Bench, prompts: list[list[int]], new_tokens: int, *, scattered: int | None) -> list[Sequence]:
    """Give every prompt blocks for its whole length: neighbours, or scattered by the seed given."""
    free = list(range(bench.cache.num_blocks))
    if scattered is not None:
        random.Random(scattered).shuffle(free)
    sequences = []
    for prompt in prompts:
        need = -(-(len(prompt) + new_tokens) // bench.cache.block_size)
        assert need <= len(free), "the test's cache is too small"
        sequences.append(Sequence(list(prompt), free[:need]))
        del free[:need]
    return sequences


def generate(
    bench: Bench, prompts: list[list[int]], new_tokens: int, *, chunk: int = 512, scattered: int | None = 0
) -> list[list[int]]:
    """Continue all prompts greedily in one batch; each adds up to `chunk` tokens a step."""
    sequences = make_sequences(bench, prompts, new_tokens, scattered=scattered)
    while live := [one for one in sequences if len(one.generated) < new_tokens]:
        chunks = [one.chunk(chunk) for one in live]
        logits = bench.runner.run(StepPlan(chunks=chunks), lambda layer: None)
        picks = iter(logits.argmax(-1).tolist())
        for one, part in zip(live, chunks, strict=True):
            one.num_computed += len(part.token_ids)
            if part.needs_logits:
                one.generated.append(next(picks))
                one.token_ids.append(one.generated[-1])
    return [one.generated for one in sequences]
