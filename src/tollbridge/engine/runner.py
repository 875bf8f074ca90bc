"""One forward pass per step: flattens the plan into one row of tokens and asks the model for the logits needed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tollbridge.engine.attention import STEP, build_step
from tollbridge.engine.cache import PagedKVCache
from tollbridge.engine.fixed import FixedDecoder
from tollbridge.engine.model import LoadedModel
from tollbridge.errors import UnsupportedError
from tollbridge.sched.plan import SequenceChunk, StepPlan


@dataclass(frozen=True, kw_only=True)
class RunnerStatistics:
    """Counters since start."""

    steps_total: int
    tokens_total: int


class ModelRunner:
    """Runs plans on a loaded model and its cache. Called from one thread."""

    def __init__(self, model: LoadedModel, cache: PagedKVCache, *, decoder: FixedDecoder | None = None) -> None:
        """`decoder` runs the steps that it takes: on a GPU, as graphs."""
        self.num_layers = model.num_layers
        self._model = model
        self._cache = cache
        self._decoder = decoder
        self._steps_total = 0
        self._tokens_total = 0

    @torch.inference_mode()
    def run(self, plan: StepPlan, on_layer: Callable[[int], None]) -> torch.Tensor:
        """Compute the plan; return float32 logits `[plan.num_rows, vocab_size]`, chunk by chunk in plan order.

        `on_layer(layer)` is called once the KV of the plan's tokens is in the cache, before the layer attends; for a
        step of the decoder, when all of it has been issued.
        """
        if not plan.chunks:
            raise ValueError("a plan must have a chunk")
        self._steps_total += 1
        self._tokens_total += plan.num_tokens
        if self._decoder is not None and self._decoder.takes(plan.chunks):
            logits = self._decoder.run(plan.chunks)
            for layer in range(self.num_layers):
                on_layer(layer)
            return logits
        return self._run(plan, on_layer)

    def _run(self, plan: StepPlan, on_layer: Callable[[int], None]) -> torch.Tensor:
        step = build_step(plan, self._cache, on_layer)
        out = self._model.module(
            input_ids=self._row(itertools.chain.from_iterable(chunk.token_ids for chunk in plan.chunks)),
            position_ids=self._row(itertools.chain.from_iterable(map(_positions, plan.chunks))),
            use_cache=False,
            logits_to_keep=self._logit_rows(plan),
            **{STEP: step},
        )
        if step.num_layers_done != self.num_layers:
            raise UnsupportedError(
                f"Model {self._model.name} ran attention {step.num_layers_done} times in {self.num_layers} layers; "
                "the embedded engine needs exactly one full attention in each."
            )
        logits: torch.Tensor = out.logits[0]
        return logits.float()

    def warm_up(self) -> None:
        """Run one token through every layer, so that an unfit model fails now and the first request finds warm code.

        Uses block 0 and clears it; call before the first request.
        """
        chunk = SequenceChunk(request_id="warm-up", token_ids=(0,), first_token=0, block_table=(0,), needs_logits=True)
        with torch.inference_mode():
            self._run(StepPlan(chunks=(chunk,)), lambda layer: None)
        self._cache.tensor[:, 0].zero_()

    def statistics(self) -> RunnerStatistics:
        return RunnerStatistics(steps_total=self._steps_total, tokens_total=self._tokens_total)

    def _row(self, values: itertools.chain[int]) -> torch.Tensor:
        return torch.tensor([list(values)], device=self._model.device)  # [1, num_tokens]

    def _logit_rows(self, plan: StepPlan) -> torch.Tensor:
        """Return the places, in the flattened step, of the tokens whose logits are wanted: the last of their chunks."""
        ends = itertools.accumulate(len(chunk.token_ids) for chunk in plan.chunks)
        rows = [row for chunk, end in zip(plan.chunks, ends, strict=True) for row in range(end - chunk.num_rows, end)]
        return torch.tensor(rows, dtype=torch.int64, device=self._model.device)


def _positions(chunk: SequenceChunk) -> range:
    return range(chunk.first_token, chunk.first_token + len(chunk.token_ids))
