"""What the core loop drives: the runner, the sampler and the text stream. No torch here, so tests drive fakes.

The loop owns requests, blocks and time; behind these ports live the model, its cache memory and the vocabulary. All of
them are called from the engine's thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tollbridge.engine.base import SamplingParams, TokenLogprobs
from tollbridge.engine.draws import Draw
from tollbridge.sched.plan import StepPlan


class Runner(Protocol):
    """One forward pass over a plan, reading and writing the paged KV cache."""

    num_layers: int

    def run(self, plan: StepPlan, on_layer: Callable[[int], None]) -> object:
        """Compute the plan; return logits `[plan.num_rows, vocab_size]`, chunk by chunk in plan order.

        The KV of the plan's tokens is written to the cache. `on_layer(layer)` is called for layers 0, 1, ... once the
        KV of all of the plan's tokens in that layer can be read by other threads or, on a GPU, by what is issued behind
        it; it is cheap and does not raise.
        An exception ends the plan's requests with finish_reason "error"; the engine goes on with the others.
        """
        ...


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token per draw; the rest by its index, for those draws that have it."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)  # one sentence each: this token means nothing


class Sampler(Protocol):
    """Draws one token per row of logits."""

    def sample(self, logits: object, draws: Sequence[Draw], rows: Sequence[int] | None = None) -> Sampled:
        """Draw `draws[i]` from row `rows[i]` of the logits, None: from row i.

        It depends on that row and that draw only.
        """
        ...

    def score(self, logits: object, first_row: int, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """Return the log probabilities of `token_ids`, each by one row from `first_row` on."""
        ...


class TextStream(Protocol):
    """The text of one request: incremental detokenization, with its stop strings."""

    def push(self, token_id: int, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Add a token; return the new text and the stop string that is now complete, if any.

        The text is whole characters only; what may be the start of a stop string is held back. On a match the text
        ends before the stop string (behind it, where that is wanted), and `push` is not called again. Unless it
        `may_stop`, a stop string that is complete now is text like any other.
        """
        ...

    def finish(self) -> str:
        """Return what was held back, when the request ends for another reason than a stop string."""
        ...


class TextStreamFactory(Protocol):
    """Makes the text stream of a request."""

    def __call__(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> TextStream: ...
