"""Sampling as OpenAI and vLLM define it, written down as plainly as can be: the truth to compare with.

Shares with the engine only the number that (seed, position) gives. Everything is done to the whole vocabulary, in the
order of vLLM's sampler, in float32 where vLLM works in float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from tollbridge.engine.base import SamplingParams
from tollbridge.engine.sampler import uniform

NEVER = np.float32(-np.inf)


def pick(
    logits: Any,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    num_new: int | None = None,
    seed: int,
    end_ids: Collection[int] = (),
    allowed: Collection[int] | None = None,
) -> int:
    """Return the next token of `output`, the last `num_new` tokens of which this request generated (None: all).

    `allowed` are the tokens that the structure allows.
    """
    scores = shaped(
        logits,
        params,
        prompt,
        output,
        num_new=len(output) if num_new is None else num_new,
        end_ids=end_ids,
        allowed=allowed,
    )
    if params.temperature == 0:
        return int(np.argmax(scores))
    scores = (scores - scores.max()) / np.float32(params.temperature)
    probs = np.exp(scores)
    probs[probs < np.float32(params.min_p)] = 0
    if params.top_k:
        probs[probs < np.sort(probs)[::-1][min(params.top_k, len(probs)) - 1]] = 0
    probs[probs < _nucleus(probs, params.top_p)] = 0
    target = uniform(seed, len(prompt) + len(output)) * probs.sum(dtype=np.float64)
    total = 0.0
    for token, prob in enumerate(probs):
        total += float(prob)
        if total > target:
            return token
    raise AssertionError("the probabilities do not add up")


def shaped(
    logits: Any,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    num_new: int,
    end_ids: Collection[int],
    allowed: Collection[int] | None,
) -> Any:
    """Return the logits after everything that may change which one is the largest."""
    scores = np.array(logits, dtype=np.float32)
    for token in range(len(scores)):
        if allowed is not None and token not in allowed:
            scores[token] = NEVER
        if params.allowed_token_ids and token not in params.allowed_token_ids:
            scores[token] = NEVER
    for word in params.bad_words:
        if [*output, word[-1]][-len(word) :] == list(word):
            scores[word[-1]] = NEVER
    if num_new < params.min_tokens:
        ends = {*end_ids, *params.stop_token_ids}
        if allowed is None or not set(allowed) <= ends:
            scores[list(ends)] = NEVER
    for token, bias in params.logit_bias:
        scores[token] += np.float32(bias)
    penalty = np.float32(params.repetition_penalty)
    for token in {*prompt, *output}:
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token, count in Counter(output).items():
        scores[token] -= np.float32(params.frequency_penalty) * np.float32(count)
        scores[token] -= np.float32(params.presence_penalty)
    return scores


def likeliest(logits: Any, count: int) -> tuple[int, ...]:
    return tuple(sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:count])


def _nucleus(probs: Any, top_p: float) -> Any:
    falling = np.sort(probs)[::-1]
    share = np.cumsum(falling, dtype=np.float64) / falling.sum(dtype=np.float64)
    return falling[np.flatnonzero(share >= top_p)[0]] if top_p < 1 else np.float32(0)
