"""What a request does to its logits before a token is picked, in vLLM's order. Pure numpy, one row, in place.

    the structure, allowed ids, bad words, min_tokens, logit_bias, repetition, frequency and presence penalty

vLLM masks by the structure before it takes the logprobs, so that comes apart (`mask_structure`). What is then left of a
row in which `min_tokens` forbids the only tokens that a structure allows: these, since the structure is complete.
"""

from __future__ import annotations

import numpy as np

from tollbridge.engine.draws import Draw, Floats

NEVER = np.float32("-inf")


def mask_structure(logits: Floats, draw: Draw) -> None:
    """Forbid what the structure does not allow next."""
    allowed = draw.matcher.maybe_allowed() if draw.matcher is not None else None
    if allowed is not None:
        logits[~allowed] = NEVER


def shape(logits: Floats, draw: Draw) -> None:
    """Apply all but the structure to `logits` `[vocab_size]`."""
    params = draw.params
    if len(draw.allowed_ids):
        kept = logits[draw.allowed_ids]
        logits.fill(NEVER)
        logits[draw.allowed_ids] = kept
    if draw.output is not None:
        _forbid_bad_words(logits, draw.output, params.bad_words)
    if draw.num_drawn < params.min_tokens:
        _forbid_ends(logits, draw)
    if len(draw.bias_ids):
        logits[draw.bias_ids] += draw.biases
    _penalise(logits, draw)


def _forbid_bad_words(logits: Floats, output: list[int], bad_words: tuple[tuple[int, ...], ...]) -> None:
    """Forbid each token that would complete a bad word."""
    for word in bad_words:
        num_before = len(word) - 1
        if num_before <= len(output) and tuple(output[len(output) - num_before :]) == word[:-1]:
            logits[word[-1]] = NEVER


def _forbid_ends(logits: Floats, draw: Draw) -> None:
    kept = logits[draw.end_ids]
    logits[draw.end_ids] = NEVER
    if draw.matcher is not None and logits.max() == NEVER:
        logits[draw.end_ids] = kept


def _penalise(logits: Floats, draw: Draw) -> None:
    params = draw.params
    if draw.seen is not None:
        ids, penalty = draw.seen.ids, np.float32(params.repetition_penalty)
        scores = logits[ids]
        logits[ids] = np.where(scores > 0, scores / penalty, scores * penalty)
    if draw.generated is not None:
        ids = draw.generated.ids
        logits[ids] -= np.float32(params.frequency_penalty) * draw.generated.counts
        logits[ids] -= np.float32(params.presence_penalty)
