from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollbridge.router.fair import FairQueue


def test_a_flood_of_one_tenant_does_not_delay_another() -> None:
    queue: FairQueue[str] = FairQueue({"flood": 1, "quiet": 1})
    for at in range(100):
        queue.push("flood", f"f{at}", work=1)
    queue.push("quiet", "q0", work=1)
    queue.push("quiet", "q1", work=1)
    first = [queue.pop() for _ in range(4)]
    assert {"q0", "q1"} <= set(first)


def test_shares_are_by_weight_and_work() -> None:
    queue: FairQueue[str] = FairQueue({"heavy": 3, "light": 1})
    for _ in range(200):
        queue.push("heavy", "heavy", work=2)
        queue.push("light", "light", work=1)
    served = Counter(queue.pop() for _ in range(100))
    assert served["heavy"] * 2 / served["light"] == pytest.approx(3, rel=0.1)


def test_who_was_idle_owes_and_saves_nothing() -> None:
    queue: FairQueue[str] = FairQueue({"a": 1, "b": 1})
    for _ in range(50):
        queue.push("a", "a", work=1)
        queue.pop()
    for _ in range(10):
        queue.push("a", "a", work=1)
        queue.push("b", "b", work=1)
    assert Counter(queue.pop() for _ in range(10)) == {"a": 5, "b": 5}


def test_priority_orders_within_a_tenant_only() -> None:
    queue: FairQueue[str] = FairQueue({"a": 1, "b": 1})
    queue.push("a", "late", work=1, priority=5)
    queue.push("a", "early", work=1, priority=-5)
    queue.push("b", "other", work=1)
    assert [queue.pop() for _ in range(3)] == ["early", "other", "late"]
    with pytest.raises(IndexError):
        queue.pop()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-2, 2), st.sampled_from(["push", "pop", "remove"]))))
def test_nothing_is_lost_or_served_twice(steps: list[tuple[str, int, str]]) -> None:
    queue: FairQueue[object] = FairQueue({"a": 1, "b": 2, "c": 0.5})
    inside: dict[object, str] = {}
    for tenant, priority, what in steps:
        if what == "push":
            item = object()
            queue.push(tenant, item, work=1 + abs(priority), priority=priority)
            inside[item] = tenant
        elif what == "pop" and inside:
            del inside[queue.pop()]
        elif what == "remove" and inside:
            item, owner = next(iter(inside.items()))
            assert queue.remove(owner, item)
            assert not queue.remove(owner, item)
            del inside[item]
        queue.check()
        assert len(queue) == len(inside)
    while inside:
        del inside[queue.pop()]
