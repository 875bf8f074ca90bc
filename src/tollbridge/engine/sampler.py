"""Draws tokens from logits: greedy, temperature, top-k, top-p, seeded.

A draw depends on its own row of logits, its parameters, its seed and the token's position, never on the batch around
it or on how many draws came before. So a request that moves to another worker, or is recomputed after a preemption,
goes on as it would have. There is no generator state: the one uniform number a draw needs is a hash of (seed,
position), and the token is where the cumulative distribution, in vocabulary order, passes it.

Filters keep every token as likely as the last one kept, so ties never depend on a sort's whim. Order: temperature,
top-k, top-p of what is left, as vLLM and transformers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tollbridge.engine.base import SamplingParams

GREEDY_BELOW = 1e-5  # temperature
MASK_64 = (1 << 64) - 1
NUM_LIKELY = 256  # top-p is sought among the likeliest tokens first; a full sort of the vocabulary is the fallback


@dataclass(frozen=True, kw_only=True)
class SamplerStatistics:
    """Counters since start."""

    greedy_total: int
    random_total: int


class TokenSampler:
    """Implements `ports.Sampler` with torch."""

    def __init__(self) -> None:
        self._greedy_total = 0
        self._random_total = 0

    @torch.inference_mode()
    def sample(
        self, logits: object, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]
    ) -> list[int]:
        """Return one token id per row of `logits` `[num_rows, vocab_size]`."""
        assert isinstance(logits, torch.Tensor)
        if not params:
            return []
        token_ids: list[int] = logits.argmax(dim=-1).tolist()
        drawn = [row for row, one in enumerate(params) if one.temperature >= GREEDY_BELOW]
        self._greedy_total += len(params) - len(drawn)
        self._random_total += len(drawn)
        if drawn:
            uniforms = [uniform(seeds[row], positions[row]) for row in drawn]
            picks = _draw(logits[drawn], [params[row] for row in drawn], uniforms)
            for row, token_id in zip(drawn, picks, strict=True):
                token_ids[row] = token_id
        return token_ids

    def statistics(self) -> SamplerStatistics:
        return SamplerStatistics(greedy_total=self._greedy_total, random_total=self._random_total)


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends on `seed` and `position` only: two rounds of SplitMix64 (Steele 2014)."""
    return (_mix(_mix(seed & MASK_64) + position) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def _draw(logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[int]:
    """Draw one token per row of `logits` `[num_rows, vocab_size]`; float64, so that the sum of many tails is right."""
    device = logits.device
    temperatures = torch.tensor([one.temperature for one in params], dtype=torch.float64, device=device)
    scores = logits.double() / temperatures[:, None]
    _keep_top_k(scores, [one.top_k for one in params])
    probs = scores.softmax(dim=-1)
    _keep_top_p(probs, [one.top_p for one in params])
    cumulative = probs.cumsum(dim=-1)
    targets = torch.tensor(uniforms, dtype=torch.float64, device=device)[:, None] * cumulative[:, -1:]
    picks = torch.searchsorted(cumulative, targets, right=True)[:, 0]  # the first token whose sum exceeds the target
    token_ids: list[int] = picks.clamp_(max=logits.shape[-1] - 1).tolist()
    return token_ids


def _keep_top_k(scores: torch.Tensor, top_ks: Sequence[int]) -> None:
    """Set the scores below each row's k-th largest to -inf, in place; k = 0 keeps all."""
    vocab_size = scores.shape[-1]
    rows = [row for row, k in enumerate(top_ks) if 0 < k < vocab_size]
    if not rows:
        return
    ks = torch.tensor([top_ks[row] for row in rows], device=scores.device)
    best = scores[rows].topk(int(ks.max()), dim=-1).values  # [num rows, max k], falling
    threshold = best.gather(1, ks[:, None] - 1)
    scores[rows] = scores[rows].masked_fill(scores[rows] < threshold, float("-inf"))


def _keep_top_p(probs: torch.Tensor, top_ps: Sequence[float]) -> None:
    """Zero what lies outside the smallest set of likeliest tokens whose sum reaches each row's p, in place."""
    for row, top_p in enumerate(top_ps):
        if top_p < 1.0:
            line = probs[row]
            line.masked_fill_(line < _nucleus_threshold(line, top_p), 0.0)


def _nucleus_threshold(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return the probability of the last token in the nucleus of `probs` `[vocab_size]`."""
    likeliest = probs.topk(min(NUM_LIKELY, len(probs))).values
    if float(likeliest.sum()) < top_p:
        likeliest = probs.sort(descending=True).values
    reached = torch.searchsorted(likeliest.cumsum(0), top_p)  # the first whose sum is at least p
    return likeliest[reached.clamp_(max=len(likeliest) - 1)]
