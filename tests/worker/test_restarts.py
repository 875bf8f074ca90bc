"""When a child that ended may be started again."""

from __future__ import annotations

from tollbridge.worker.restarts import RestartPolicy, Restarts

POLICY = RestartPolicy(first_pause_s=1.0, longest_pause_s=3.0, max_in_a_row=4, settled_s=60.0)


def test_pauses_grow_to_a_bound_and_then_it_is_over() -> None:
    restarts = Restarts(POLICY)
    assert [restarts.maybe_pause_s(-9, 0.0, 1.0) for _ in range(6)] == [1.0, 2.0, 3.0, 3.0, None, None]
    assert restarts.total == 4


def test_a_long_life_begins_a_new_row() -> None:
    restarts = Restarts(POLICY)
    assert [restarts.maybe_pause_s(1, 0.0, 1.0) for _ in range(4)][-1] == 3.0
    assert restarts.maybe_pause_s(1, 0.0, 60.0) == 1.0
    assert restarts.maybe_pause_s(0, 0.0, 59.0) == 2.0, "nobody asked it to end"
    assert restarts.total == 6


def test_who_cannot_start_is_not_started_again() -> None:
    assert Restarts(POLICY).maybe_pause_s(3, 0.0, 1e9) is None
