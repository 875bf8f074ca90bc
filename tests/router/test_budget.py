from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tollbridge.router.budget import RetryBudget


def test_a_full_budget_serves_a_burst_and_then_a_fraction() -> None:
    budget = RetryBudget(fraction=0.25, burst=2)
    assert [budget.withdraw() for _ in range(3)] == [True, True, False]
    for _ in range(3):
        budget.deposit()
    assert not budget.withdraw()
    budget.deposit()
    assert budget.withdraw()
    assert budget.statistics().taken_total == 3


@given(st.lists(st.booleans(), max_size=400))
def test_attempts_are_bounded_whatever_happens(requests: list[bool]) -> None:
    """Each request may want a retry for ever; it gets no more than the budget holds."""
    budget = RetryBudget(fraction=0.2, burst=5)
    for greedy in requests:
        budget.deposit()
        while greedy and budget.withdraw():
            pass
        budget.check()
    assert budget.statistics().taken_total <= 5 + 0.2 * len(requests)
