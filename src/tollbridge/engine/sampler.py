"""Draws tokens from logits: greedy or by chance, with the filters and penalties of OpenAI and vLLM, seeded.

A draw depends on its own row of logits and its own `Draw`, never on the batch around it or on how many draws came
before. So a request that moves to another worker, or is recomputed after a preemption, goes on as it would have. There
is no generator state: the one uniform number a draw needs is a hash of (seed, position), and the token is where the
cumulative distribution, in vocabulary order, passes it.

Filters keep every token as likely as the last one kept, so ties never depend on a sort's whim. Order: structure and
`shaping`, temperature, min-p, top-k, top-p of what is left, as vLLM does; log probabilities are those of the raw
logits.

Rows that only want the likeliest token are picked together, where the logits are. The others are brought to the host at
once and drawn one by one with numpy, which sorts a vocabulary twenty times faster than torch on CPUs.
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

Places = npt.NDArray[np.intp]

MIN_TEMPERATURE = 0.01  # of draws by chance, as in vLLM: less overflows
MASK_64 = (1 << 64) - 1
FIRST_NUCLEUS = 1024  # tokens that are added up first: a nucleus has seldom more
RUN = 512  # tokens whose probabilities are summed up at once
NOTHING_LEFT = "Nothing can be drawn: structure, bad_words, allowed_token_ids and logit_bias forbid every token."


@dataclass(frozen=True, kw_only=True)
class SamplerStatistics:
    """Counters since start."""

    greedy_total: int
    random_total: int


class TokenSampler:
    """Implements `ports.Sampler`."""

    def __init__(self) -> None:
        self._scratch = np.empty(0, dtype=np.float32)  # [vocab_size]; a fresh array each time costs as much as its use
        self._greedy_total = 0
        self._random_total = 0

    @torch.inference_mode()
    def sample(self, logits: object, draws: Sequence[Draw], rows: Sequence[int] | None = None) -> Sampled:
        """Draw from `logits`, float32 `[num_rows, vocab_size]`; RuntimeError when a row is NaN."""
        assert isinstance(logits, torch.Tensor)
        if not draws:
            return Sampled([])
        places = range(len(draws)) if rows is None else rows
        together = [index for index, draw in enumerate(draws) if not _needs_row(draw)]
        sampled = Sampled([0] * len(draws), {}, {})
        for index, token_id in zip(together, _best(_pick_rows(logits, [places[i] for i in together])), strict=True):
            sampled.token_ids[index] = token_id
        if len(together) < len(draws):
            one_by_one = [index for index, draw in enumerate(draws) if _needs_row(draw)]
            host = _pick_rows(logits, [places[i] for i in one_by_one]).cpu().numpy()
            for index, row in zip(one_by_one, host, strict=True):
                self._draw_into(sampled, index, row, draws[index])
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

    def _draw_into(self, sampled: Sampled, index: int, row: Floats, draw: Draw) -> None:
        """Draw one token from `row`, which is left as it is."""
        scores = row
        if draw.shapes:
            row = row.copy() if draw.matcher is not None else row
            mask_structure(row, draw)
            scores = row.copy()
            shape(scores, draw)
        best = int(scores.argmax())
        if np.isnan(scores[best]):
            raise RuntimeError(f"the logits of rows [{index}] are not numbers")
        if scores[best] == NEVER:
            sampled.errors[index] = NOTHING_LEFT
            return
        if not draw.is_greedy:
            number = uniform(draw.seed, draw.position)
            best = _pick(scores, scores[best], draw.params, number, self._scratch_of(len(scores)))
        sampled.token_ids[index] = best
        if draw.params.logprobs is not None:
            sampled.logprobs[index] = token_logprobs(row, best, draw.params.logprobs)

    def _scratch_of(self, size: int) -> Floats:
        if len(self._scratch) != size:
            self._scratch = np.empty(size, dtype=np.float32)
        return self._scratch


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends on `seed` and `position` only: two rounds of SplitMix64 (Steele 2014)."""
    return (_mix(_mix(seed & MASK_64) + position) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def _pick_rows(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return `rows` of the logits, without a copy where they are all of them in order."""
    if len(rows) == len(logits) and all(row == index for index, row in enumerate(rows)):
        return logits
    return logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)]


def _best(logits: torch.Tensor) -> list[int]:
    """Return the id of the largest logit of each row; RuntimeError for a row with NaN, which has no largest."""
    if not len(logits):
        return []
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


def _pick(logits: Floats, highest: np.float32, params: SamplingParams, number: float, scratch: Floats) -> int:
    """Return the token at `number` (in [0, 1)) of the distribution that `logits` `[vocab_size]` and `params` make.

    `highest` is the largest logit; `scratch` is as long as the logits, and overwritten.
    """
    scores = np.subtract(logits, highest, out=scratch)
    if params.temperature != 1.0:
        scores /= np.float32(max(params.temperature, MIN_TEMPERATURE))
    candidates = _candidates(scores, params)
    probs = np.exp(scores, out=scratch) if candidates is None else np.exp(scores[candidates])  # up to a factor
    if params.top_p < 1.0:
        kept = np.flatnonzero(probs >= _nucleus_threshold(probs, params.top_p))
        candidates = kept if candidates is None else candidates[kept]
        probs = probs[kept]
    pick = _at(probs, number)
    return pick if candidates is None else int(candidates[pick])


def _candidates(scores: Floats, params: SamplingParams) -> Places | None:
    """Return the tokens that min-p and top-k leave, in vocabulary order; None for all."""
    border = np.float32(np.log(params.min_p)) if params.min_p > 0 else NEVER
    if 0 < params.top_k < len(scores):
        place = len(scores) - params.top_k
        border = max(border, np.partition(scores, place)[place])
    return None if border == NEVER else np.flatnonzero(scores >= border)


def _nucleus_threshold(probs: Floats, top_p: float) -> np.float32:
    """Return the probability of the last token in the smallest set of likeliest ones whose share reaches `top_p`."""
    share = top_p * probs.sum(dtype=np.float64)
    rising = np.sort(probs)  # 80 us with AVX-512, a third of what a running sum over a vocabulary takes
    size = FIRST_NUCLEUS
    while True:
        falling = rising[-size:][::-1]
        cumulative = falling.cumsum(dtype=np.float64)
        if cumulative[-1] >= share or size >= len(rising):
            place = int(cumulative.searchsorted(share))
            threshold: np.float32 = falling[min(place, len(falling) - 1)]
            return threshold
        size *= 4


def _at(probs: Floats, number: float) -> int:
    """Return the place at which the running sum of `probs` passes the share `number` (in [0, 1)) of all.

    First the run of places, by the sums of runs, then the place in it: a running sum of all costs as much as the rest.
    """
    num_runs = len(probs) // RUN
    sums = np.append(probs[: num_runs * RUN].reshape(num_runs, RUN).sum(axis=1), probs[num_runs * RUN :].sum())
    running = sums.cumsum(dtype=np.float64)
    target = number * running[-1]
    run = int(running.searchsorted(target, side="right"))
    before = running[run - 1] if run else 0.0
    part = probs[run * RUN : (run + 1) * RUN]
    place = int(part.cumsum(dtype=np.float64).searchsorted(target - before, side="right"))
    # two sums of the same numbers may differ in the last digit: then it is the last token that can be drawn
    return run * RUN + (place if place < len(part) else int(np.flatnonzero(part)[-1]))
