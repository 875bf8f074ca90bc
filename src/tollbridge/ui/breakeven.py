"""From which prompt on does a split pay, over the link and with the engine as they are measured now? Pure.

Local, a prompt of m tokens keeps each stream beside it waiting for T(m) less the steps it would have taken anyway.
Split, it waits itself for what of its KV has not crossed when prefill ends, one step of decode, and the second leg.
Both are seconds; where the curves cross, one stream is spared as much as the request pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tollbridge.cost.engine import DEFAULT_BUDGET, EngineModel, num_steps
from tollbridge.cost.toll import PIECES_PER_CHUNK, visible_s
from tollbridge.ui.snapshot import BreakEven

LENGTHS = (32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 32768)


class Ground(NamedTuple):
    """What is measured of one pair."""

    prefill: str
    decode: str
    sender: EngineModel
    receiver: EngineModel
    budget: int  # tokens of a step, 0: not known
    goodput_bytes_per_s: float
    bytes_per_token: float
    overhead_s: float  # of the second leg


def break_even(ground: Ground, lengths: Sequence[int] = LENGTHS) -> BreakEven:
    """Return both curves over prompts of `lengths` uncached tokens, ascending."""
    stalls = [_stall_s(ground, each) for each in lengths]
    tolls = [_toll_s(ground, each) for each in lengths]
    return BreakEven(
        prefill=ground.prefill,
        decode=ground.decode,
        num_tokens=list(lengths),
        stall_s=[float(f"{each:.4g}") for each in stalls],
        toll_s=[float(f"{each:.4g}") for each in tolls],
        tokens_at_par=_crossing(lengths, [stall - toll for stall, toll in zip(stalls, tolls, strict=True)]),
    )


def _stall_s(ground: Ground, num_tokens: int) -> float:
    budget = ground.budget or DEFAULT_BUDGET
    steps_s = num_steps(num_tokens, budget) * ground.receiver.delta_s
    return max(ground.receiver.prefill_s(num_tokens, 0.0, budget) - steps_s, 0.0)


def _toll_s(ground: Ground, num_tokens: int) -> float:
    budget = ground.budget or DEFAULT_BUDGET
    visible = visible_s(
        ground.bytes_per_token * max(num_tokens - 1, 0),
        ground.goodput_bytes_per_s,
        compute_s=ground.sender.prefill_s(num_tokens, 0.0, budget),
        num_pieces=PIECES_PER_CHUNK * num_steps(num_tokens, budget),
    )
    return visible + ground.receiver.step_s(1) + ground.overhead_s


def _crossing(lengths: Sequence[int], gains: Sequence[float]) -> int | None:
    """Return the length from which on the gain is above zero up to the longest; None when it is not even there."""
    if gains[-1] <= 0:
        return None
    last = max((at for at, gain in enumerate(gains) if gain <= 0), default=None)
    if last is None:
        return lengths[0]
    below, above = gains[last], gains[last + 1]
    share = -below / (above - below)
    return round(lengths[last] + share * (lengths[last + 1] - lengths[last]))
