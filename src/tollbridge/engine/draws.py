"""What the next token of a request is drawn with, beside its logits: parameters, seed, and the tokens so far. No torch.

A draw follows from the request's own tokens alone, not from blocks, steps or the batch. So it survives a preemption as
it is, and a worker that continues another's answer rebuilds it from the prompt and the tokens already sent, which count
as output (`num_continued_tokens`) to penalties, bad words and the structure. `max_tokens` and `min_tokens` count new
ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tollbridge.engine.base import SamplingParams
from tollbridge.errors import RequestError

GREEDY_BELOW = 1e-5  # temperature
SEED_MASK = (1 << 64) - 1

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class Matcher(Protocol):
    """How far an output has got in its structure."""

    def maybe_allowed(self) -> Mask | None:
        """Return which tokens may come next, `[vocab_size]`; None when it asks for nothing (any more)."""
        ...

    def take(self, token_id: int) -> str:
        """Go on by a token; return one sentence when the structure does not allow it, else nothing."""
        ...


class Counts:
    """How often each token was seen: two arrays that grow in step."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        self._places: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)
        for token_id in token_ids:
            self.add(token_id)

    @property
    def ids(self) -> Ids:
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> Floats:
        return self._counts[: len(self._places)]

    def add(self, token_id: int) -> None:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token_id
        self._counts[place] += 1


class Draw:
    """The draws of one request, one after the other. Owned by the request; the sampler reads it."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        *,
        seed: int,
        num_continued: int = 0,
        end_ids: Iterable[int] = (),  # with which the output may end, whether or not it is to ignore them
        matcher: Matcher | None = None,
    ) -> None:
        self.params = params
        self.seed = seed & SEED_MASK
        self.position = len(prompt)  # in the sequence, of the next token
        self.num_drawn = 0
        self._num_continued = num_continued
        self.matcher = matcher
        self.is_greedy = params.temperature < GREEDY_BELOW
        self.end_ids = np.array(sorted({*end_ids, *params.stop_token_ids}), dtype=np.int64)
        self.allowed_ids = np.array(params.allowed_token_ids, dtype=np.int64)
        self.bias_ids = np.array([token_id for token_id, _ in params.logit_bias], dtype=np.int64)
        self.biases = np.array([bias for _, bias in params.logit_bias], dtype=np.float32)
        before, output = prompt[: len(prompt) - num_continued], prompt[len(prompt) - num_continued :]
        counts_output = params.presence_penalty != 0 or params.frequency_penalty != 0
        self.generated = Counts(output) if counts_output else None
        self.seen = Counts(set(before) | set(output)) if params.repetition_penalty != 1 else None
        self.output = list(output) if params.bad_words else None
        self._shapes_always = bool(
            counts_output
            or self.seen is not None
            or params.logit_bias
            or params.allowed_token_ids
            or params.bad_words
            or matcher is not None
        )
        self._follow(output)

    @property
    def shapes(self) -> bool:
        """Whether anything is done to the logits of the next token before it is picked."""
        return self._shapes_always or self.num_drawn < self.params.min_tokens

    def take(self, token_id: int) -> str:
        """Note the token that was drawn; return one sentence when its structure does not allow it, else nothing."""
        self.position += 1
        self.num_drawn += 1
        if not self._shapes_always:
            return ""
        for counts in (self.generated, self.seen):
            if counts is not None:
                counts.add(token_id)
        if self.output is not None:
            self.output.append(token_id)
        return self.matcher.take(token_id) if self.matcher is not None else ""

    def check(self, tokens: Sequence[int]) -> None:
        """Raise AssertionError unless this draws the token behind `tokens`, the whole sequence."""
        assert self.position == len(tokens), f"the next token is drawn for {self.position}, not {len(tokens)}"
        num_output = self.num_drawn + self._num_continued
        output = tokens[len(tokens) - num_output :]
        for counts, counted in ((self.generated, output), (self.seen, tokens)):
            if counts is not None:
                assert set(counts.ids.tolist()) == set(counted), "the penalties are for other tokens"
        assert self.generated is None or self.generated.counts.sum() == num_output, "the output was miscounted"
        assert self.output is None or self.output == list(output), "bad words look at another output"

    def _follow(self, output: Sequence[int]) -> None:
        if self.matcher is not None and any(map(self.matcher.take, output)):
            raise RequestError(
                "The last tokens of the prompt, which continued_tokens says were generated, do not fit the structure.",
                param="continued_tokens",
            )
