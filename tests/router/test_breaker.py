from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tollbridge.router.breaker import Breaker


def breaker() -> Breaker:
    return Breaker(first_s=1.0, longest_s=4.0)


def test_failures_that_come_together_count_as_one() -> None:
    b = breaker()
    for now_s in (10.0, 10.1, 10.9):
        b.failed(now_s)
    assert b.state(10.99) == "open"
    assert b.state(11.0) == "half_open"
    assert b.statistics().opened_total == 1


def test_one_probe_at_a_time_decides() -> None:
    b = breaker()
    b.failed(0.0)
    assert b.refuses(0.5)
    assert not b.refuses(1.0)
    b.begin("probe", 1.0)
    b.begin("another", 1.0)  # sent all the same, nobody else could serve: not the probe
    assert b.refuses(1.0)
    b.end("another")
    assert b.refuses(1.0)
    b.succeeded()
    b.end("probe")
    assert (b.state(1.0), b.refuses(1.0)) == ("closed", False)


def test_each_failed_probe_doubles_the_pause_up_to_a_bound() -> None:
    b, now_s, pauses = breaker(), 0.0, []
    for _ in range(4):
        b.failed(now_s)
        start_s = now_s
        while b.state(now_s) == "open":
            now_s += 0.5
        pauses.append(now_s - start_s)
        b.begin("probe", now_s)
    assert pauses == [1.0, 2.0, 4.0, 4.0]
    b.succeeded()
    b.failed(now_s)
    assert b.state(now_s + 1.0) == "half_open"  # a success forgets


def test_a_probe_without_a_verdict_makes_way() -> None:
    b = breaker()
    b.failed(0.0)
    b.begin("gone", 1.0)
    b.end("gone")
    assert not b.refuses(1.0)
    b.begin("next", 1.0)
    assert b.refuses(1.0)
    assert b.statistics().probes_total == 2


@given(st.lists(st.tuples(st.sampled_from(["begin", "end", "fail", "ok"]), st.integers(0, 3), st.floats(0, 5))))
def test_it_never_stays_shut(steps: list[tuple[str, int, float]]) -> None:
    """Whatever happened: once all requests have ended, it lets one pass within the longest pause."""
    b, now_s = breaker(), 0.0
    for what, request, seconds in steps:
        now_s += seconds
        if what == "begin":
            b.begin(request, now_s)
        elif what == "end":
            b.end(request)
        elif what == "fail":
            b.failed(now_s)
        else:
            b.succeeded()
        b.check()
    for request in range(4):
        b.end(request)
    assert not b.refuses(now_s + 4.0)
