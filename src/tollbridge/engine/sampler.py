"""Draws tokens from logits: greedy or by chance, with the filters and penalties of OpenAI and vLLM, seeded.

A draw depends on its own row of logits and its own `Draw`, never on the batch around it or on how many draws came
before. So a request that moves to another worker, or is recomputed after a preemption, goes on as it would have. There
is no generator state: the one uniform number a draw needs is a hash of (seed, position), and the token is where the
cumulative distribution, in vocabulary order, passes it.

Filters keep every token as likely as the last one kept, so ties never depend on a sort's whim. Order: structure and
`shaping`, temperature, min-p, top-k, top-p of what is left, as vLLM does; log probabilities are those of the raw
logits.

Rows that only want the likeliest token are picked together, where the logits are. The others are brought to the host at
once and drawn with numpy, which sorts a vocabulary twenty times faster than torch on CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tollbridge.engine.base import SamplingParams, TokenLogprobs
from tollbridge.engine.draws import Draw, Floats
from tollbridge.engine.logprobs import token_logprobs
from tollbridge.engine.ports import Sampled
from tollbridge.engine.shaping import NEVER, mask_structure, shape

MIN_TEMPERATURE = 0.01  # of draws by chance, as in vLLM: less overflows
MASK_64 = (1 << 64) - 1
NOTHING_LEFT = "Nothing can be drawn: structure, bad_words, allowed_token_ids and logit_bias forbid every token."


@dataclass(frozen=True, kw_only=True)
class SamplerStatistics:
    """Counters since start."""

    greedy_total: int
    random_total: int


class TokenSampler:
    """Implements `ports.Sampler`."""

    def __init__(self) -> None:
        self._greedy_total = 0
        self._random_total = 0

    @torch.inference_mode()
    def sample(self, logits: object, draws: Sequence[Draw], rows: Sequence[int] | None = None) -> Sampled:
        """Draw from `logits`, float32 `[num_rows, vocab_size]`; RuntimeError when a row is NaN."""
        assert isinstance(logits, torch.Tensor)
        if not draws:
            return Sampled([])
        if rows is not None:
            logits = logits[torch.tensor(rows, device=logits.device)]
        sampled = Sampled(_best(logits), {}, {})
        one_by_one = [index for index, draw in enumerate(draws) if _needs_row(draw)]
        if one_by_one:
            host = _on_host(logits, one_by_one)
            for index, row in zip(one_by_one, host, strict=True):
                _draw_into(sampled, index, row, draws[index])
        num_greedy = sum(draw.is_greedy for draw in draws)
        self._greedy_total += num_greedy
        self._random_total += len(draws) - num_greedy
        return sampled

    @torch.inference_mode()
    def score(self, logits: object, first_row: int, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """Return the log probabilities of `token_ids`, each by one row from `first_row` on."""
        assert isinstance(logits, torch.Tensor)
        host = logits[first_row : first_row + len(token_ids)].cpu().numpy()
        return [token_logprobs(row, token_id, num_top) for row, token_id in zip(host, token_ids, strict=True)]

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


def _best(logits: torch.Tensor) -> list[int]:
    """Return the id of the largest logit of each row; RuntimeError for a row with NaN, which has no largest."""
    if logits.device.type == "cpu":  # numpy's argmax is twenty times faster than torch's on a CPU
        host = logits.numpy()
        ids = host.argmax(-1)
        is_nan = np.isnan(host[np.arange(len(ids)), ids])
    else:  # the largest of a row with NaN is NaN; one copy to the host for both
        best, picks = logits.max(-1)
        ids, is_nan = torch.stack((picks, best.isnan().long())).cpu().numpy()
    if is_nan.any():
        raise RuntimeError(f"the logits of rows {np.flatnonzero(is_nan).tolist()} are not numbers")
    token_ids: list[int] = ids.tolist()
    return token_ids


def _needs_row(draw: Draw) -> bool:
    return not draw.is_greedy or draw.shapes or draw.params.logprobs is not None


def _on_host(logits: torch.Tensor, rows: list[int]) -> list[Floats]:
    if logits.device.type == "cpu":
        array = logits.numpy()
        return [array[row] for row in rows]
    return list(logits[torch.tensor(rows, device=logits.device)].cpu().numpy())


def _draw_into(sampled: Sampled, index: int, row: Floats, draw: Draw) -> None:
    """Draw one token from `row`, which is left as it is."""
    scores = row
    if draw.shapes:
        row = row.copy() if draw.matcher is not None else row
        mask_structure(row, draw)
        scores = row.copy()
        shape(scores, draw)
        if scores.max() == NEVER:
            sampled.errors[index] = NOTHING_LEFT
            return
    if not draw.is_greedy:
        sampled.token_ids[index] = _pick(scores, draw.params, uniform(draw.seed, draw.position))
    elif draw.shapes:
        sampled.token_ids[index] = int(scores.argmax())
    if draw.params.logprobs is not None:
        sampled.logprobs[index] = token_logprobs(row, sampled.token_ids[index], draw.params.logprobs)


def _pick(logits: Floats, params: SamplingParams, number: float) -> int:
    """Return the token at `number` (in [0, 1)) of the distribution that `logits` `[vocab_size]` and `params` make."""
    scores = (logits - logits.max()) / np.float32(max(params.temperature, MIN_TEMPERATURE))
    candidates = _candidates(scores, params)
    probs = np.exp(scores if candidates is None else scores[candidates])  # up to a factor
    if params.top_p < 1.0:
        probs[probs < _nucleus_threshold(probs, params.top_p)] = 0.0
    cumulative = probs.cumsum(dtype=np.float64)
    # the first token whose sum exceeds the target; never past the end, as number < 1
    pick = int(cumulative.searchsorted(number * cumulative[-1], side="right"))
    return pick if candidates is None else int(candidates[pick])


def _candidates(scores: Floats, params: SamplingParams) -> npt.NDArray[np.intp] | None:
    """Return the tokens that min-p and top-k leave, in vocabulary order; None for all."""
    border = np.float32(np.log(params.min_p)) if params.min_p > 0 else NEVER
    if 0 < params.top_k < len(scores):
        place = len(scores) - params.top_k
        border = max(border, np.partition(scores, place)[place])
    return None if border == NEVER else np.flatnonzero(scores >= border)


def _nucleus_threshold(probs: Floats, top_p: float) -> np.float32:
    """Return the probability of the last token in the smallest set of likeliest ones whose share reaches `top_p`."""
    total = probs.sum(dtype=np.float64)
    # All below this together are less than the share that may be left out, so the nucleus is among the others.
    likely = probs[probs >= total * (1.0 - top_p) / len(probs)]
    falling = np.sort(likely)[::-1]
    cumulative = falling.cumsum(dtype=np.float64)
    place = min(int(cumulative.searchsorted(top_p * total)), len(falling) - 1)
    threshold: np.float32 = falling[place]
    return threshold
