"""What the core loop drives: the runner, the sampler and the text stream. No torch here, so tests drive fakes.

The loop owns requests, blocks and time; behind these ports live the model, its cache memory and the vocabulary. All of
them are called from the engine's thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tollbridge.engine.base import SamplingParams
from tollbridge.sched.plan import StepPlan


class Runner(Protocol):
    """One forward pass over a plan, reading and writing the paged KV cache."""

    num_layers: int

    def run(self, plan: StepPlan, on_layer: Callable[[int], None]) -> object:
        """Compute the plan; return logits `[number of chunks with needs_logits, vocab_size]`, in plan order.

        The KV of the plan's tokens is written to the cache. `on_layer(layer)` is called for layers 0, 1, ... once the
        KV of all of the plan's tokens in that layer can be read by other threads or, on a GPU, by what is issued behind
        it; it is cheap and does not raise.
        An exception ends the plan's requests with finish_reason "error"; the engine goes on with the others.
        """
        ...


class Sampler(Protocol):
    """Draws one token per row of logits."""

    def sample(
        self, logits: object, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]
    ) -> list[int]:
        """Return one token id per row.

        A draw depends on its row, params, seed (64 bits) and position only. `positions[i]` is the position in the
        sequence of the token being drawn: the prompt's length for the first, one more for each after it.
        """
        ...


class TextStream(Protocol):
    """The text of one request: incremental detokenization, with its stop strings."""

    def push(self, token_id: int) -> tuple[str, str | None]:
        """Add a token; return the new text and the stop string that is now complete, if any.

        The text is whole characters only; what may be the start of a stop string is held back. On a match the text
        ends before the stop string, and `push` is not called again.
        """
        ...

    def finish(self) -> str:
        """Return what was held back, when the request ends for another reason than a stop string."""
        ...


class TextStreamFactory(Protocol):
    """Makes the text stream of a request."""

    def __call__(self, prompt_token_ids: Sequence[int], stop: tuple[str, ...]) -> TextStream: ...
