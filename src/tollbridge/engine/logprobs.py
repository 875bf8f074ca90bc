"""Log probabilities of tokens, by rows of logits in numpy. Pure."""

from __future__ import annotations

import numpy as np

from tollbridge.engine.base import TokenLogprobs
from tollbridge.engine.draws import Floats, Ids


def token_logprobs(logits: Floats, token_id: int, num_top: int) -> TokenLogprobs:
    """Return those of `token_id` and of the `num_top` likeliest tokens by `logits` `[vocab_size]`.

    The rank counts the tokens that are at least as likely; of equally likely ones the lowest ids come first.
    """
    top = _likeliest(logits, num_top)
    ids = [token_id, *top.tolist()]
    highest = logits.max()
    total = highest + np.log(np.exp(logits - highest).sum(dtype=np.float64))
    values = (logits[ids] - total).astype(np.float32).tolist()
    return TokenLogprobs(tuple(ids), tuple(values), rank=int(np.count_nonzero(logits >= logits[token_id])))


def _likeliest(logits: Floats, count: int) -> Ids:
    """Return the ids of the `count` largest logits, falling."""
    if count <= 0:
        return np.empty(0, dtype=np.int64)
    count = min(count, len(logits))
    border = np.partition(logits, len(logits) - count)[len(logits) - count]
    candidates = np.flatnonzero(logits >= border)
    return candidates[np.argsort(-logits[candidates], kind="stable")[:count]]
