from __future__ import annotations

from tollbridge.clock import ManualClock
from tollbridge.probe.survey import survey


class Machine:
    """Takes a second for each unit of a case, and counts."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.done: list[int] = []

    async def measure(self, case: int) -> int:
        self.clock.advance(case)
        self.done.append(case)
        return case


async def test_all_cases_are_repeated_in_rounds_when_there_is_time() -> None:
    machine = Machine()
    results = await survey([4, 1, 2], machine.measure, repeats=3, share_s=1000, clock=machine.clock)
    assert machine.done == [1, 2, 4] * 3
    assert results == {1: [1] * 3, 2: [2] * 3, 4: [4] * 3}


async def test_cases_that_would_not_fit_are_left_out_and_the_time_is_kept() -> None:
    machine = Machine()
    begun_s = machine.clock.monotonic()
    results = await survey([1, 2, 4, 8, 16, 32], machine.measure, repeats=3, share_s=30, clock=machine.clock)
    assert list(results) == [1, 2, 4]  # 3 x (1 + 2 + 4 + 8) would be 45 s
    assert machine.clock.monotonic() - begun_s <= 30


async def test_a_very_slow_machine_still_gets_the_cases_that_a_fit_needs_once() -> None:
    machine = Machine()
    results = await survey([10, 20, 40], machine.measure, repeats=3, share_s=1, clock=machine.clock)
    assert results == {10: [10], 20: [20]}
