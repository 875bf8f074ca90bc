"""Schedules follow from the seed, and arms of a block differ in nothing but the tokens."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tollbridge.bench import schedule
from tollbridge.sim.arrivals import Arrival


def test_the_same_seed_gives_the_same_arrivals() -> None:
    first, second = (schedule.arrival_times(50, 10, 1.0, Random(3)) for _ in range(2))
    assert first == second and first == sorted(first) and first[-1] < 10


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_gaps_have_the_rate_and_the_variation_asked_for(cv: float) -> None:
    times = schedule.arrival_times(100, 400, cv, Random(1))
    gaps = np.diff(times)
    assert len(times) / 400 == pytest.approx(100, rel=0.08)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1, abs=1e-9)


def test_shared_prefixes_come_in_the_same_order_to_every_arm() -> None:
    def drawn(salt: str) -> list[list[int]]:
        planned = schedule.with_prefixes(
            40, num_kinds=3, prefix_tokens=16, own_tokens=4, max_tokens=2, block=0, salt=salt, seed=1
        )
        return [list(one.prompt) for one in planned if isinstance(one.prompt, list)]

    ours, theirs = drawn("a"), drawn("b")
    assert len({tuple(prompt[:16]) for prompt in ours}) == 3
    kinds = [[p[:16] for p in prompts].index(prompt[:16]) for prompts in (ours, theirs) for prompt in prompts]
    assert kinds[:40] == kinds[40:]
    assert not {tuple(p[:16]) for p in ours} & {tuple(p[:16]) for p in theirs}
    assert len({tuple(p[16:]) for p in ours}) == 40


def test_a_trace_keeps_its_shared_prefixes_when_it_is_scaled() -> None:
    arrivals = [
        Arrival(at_s=0.0, parts=((0, 512), (9_000_000, 100)), num_output=50),
        Arrival(at_s=1.0, parts=((0, 512), (9_000_008, 100)), num_output=5000),
    ]
    first, second = schedule.from_trace(arrivals, scale=4.0, max_prompt=200, max_output=300, salt="x")
    assert first.num_prompt_tokens == second.num_prompt_tokens == 128 + 25
    assert first.prompt[:128] == second.prompt[:128] and first.prompt[128:] != second.prompt[128:]
    assert (first.max_tokens, second.max_tokens) == (12, 300)


def test_every_block_runs_all_arms_in_an_order_of_its_own() -> None:
    orders = [schedule.order("abcd", block, seed=1) for block in range(20)]
    assert all(sorted(order) == list("abcd") for order in orders)
    assert len({tuple(order) for order in orders}) > 5
    assert orders[3] == schedule.order("abcd", 3, seed=1)
