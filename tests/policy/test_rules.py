"""The rules over a made-up fleet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollbridge.errors import UnavailableError
from tollbridge.policy.registry import POLICIES
from tollbridge.policy.rules import NO_PARTNER, NOT_SPLIT, local, split
from tollbridge.policy.views import FleetView, RequestView, WorkerView

REQUEST = RequestView(id="r")
KV = ("10.0.0.1", 7801)


def p(name: str = "p0", **more: object) -> WorkerView:
    return WorkerView(name=name, prefer="prefill", kv=KV, **more)  # type: ignore[arg-type]


def d(name: str = "d0", **more: object) -> WorkerView:
    return WorkerView(name=name, prefer="decode", kv=KV, **more)  # type: ignore[arg-type]


def a(name: str = "a0", **more: object) -> WorkerView:
    return WorkerView(name=name, prefer="any", kv=KV, **more)  # type: ignore[arg-type]


def n(name: str, prefer: str, connector: str = "nixl", **more: object) -> WorkerView:
    return WorkerView(name=name, prefer=prefer, connector=connector, **more)  # type: ignore[arg-type]


def kv_less() -> WorkerView:
    return WorkerView(name="p0", prefer="prefill")


def fleet(*workers: WorkerView) -> FleetView:
    return FleetView(workers=workers)


@pytest.mark.parametrize(
    ("workers", "chosen"),
    [
        ([p(), d()], "d0"),  # a tie: by name
        ([p(), d(num_decodes=1)], "p0"),  # a hint is only a hint
        ([p(num_prefills=2), d(num_decodes=1)], "d0"),
        ([p(), d(ready=False)], "p0"),
        ([d("d0", suspect=True), d("d1", num_decodes=9)], "d1"),  # a suspect comes last
        ([d("d0", suspect=True)], "d0"),  # but it comes
        ([d("d0", num_served=5), d("d1", num_served=4)], "d1"),  # equal load is spread
        ([d("d1"), d("d0")], "d0"),
    ],
)
def test_local(workers: list[WorkerView], chosen: str) -> None:
    decision = local(REQUEST, fleet(*workers))
    assert (decision.choice, decision.decode, decision.prefill, decision.reason) == ("local", chosen, None, "policy")


def test_local_spreads_equal_load_over_all_workers() -> None:
    """With nobody in flight the turn goes to the worker that served least, whatever it prefers."""
    served = {"p0": 0, "d0": 0}
    for index in range(10):
        view = fleet(p(num_served=served["p0"]), d(num_served=served["d0"]))
        served[local(RequestView(id=str(index)), view).decode] += 1
    assert served == {"p0": 5, "d0": 5}


@pytest.mark.parametrize(
    ("workers", "prefill", "decode"),
    [
        ([p(), d()], "p0", "d0"),
        (
            [p("p0", num_prefills=2), p("p1", num_prefills=1), d("d0", num_decodes=3), d("d1", num_decodes=1)],
            "p1",
            "d1",
        ),
        ([p(), a()], "p0", "a0"),
        ([a(), d()], "a0", "d0"),
        ([a("a0", num_decodes=1), a("a1")], "a1", "a0"),
        ([kv_less(), p("p1"), d()], "p1", "d0"),
        ([n("p0", "prefill"), d("d0"), p("p1", num_prefills=9), n("d1", "decode", ready=False)], "p1", "d0"),
        ([n("p0", "prefill"), d("d0"), n("d1", "decode", num_decodes=9)], "p0", "d1"),
        ([p("p0", revision="a"), d("d0", revision="b"), d("d1", revision="a", num_decodes=9)], "p0", "d1"),
        ([p("p0", revision="b"), p("p1", revision="a", num_prefills=9), d("d0", revision="a")], "p1", "d0"),
    ],
)
def test_split(workers: list[WorkerView], prefill: str, decode: str) -> None:
    decision = split(REQUEST, fleet(*workers))
    assert (decision.choice, decision.prefill, decision.decode) == ("split", prefill, decode)


@pytest.mark.parametrize(
    ("workers", "reason"),
    [
        ([d("d0"), d("d1")], "no_ready_prefill"),
        ([p(ready=False), d()], "no_ready_prefill"),
        ([kv_less(), d()], "no_ready_prefill"),
        ([p(pinned_full=True), d()], "pinned_bound"),
        ([p("p0", pinned_full=True), p("p1", ready=False), d()], "pinned_bound"),
        ([p(), d(ready=False)], "no_ready_decode"),
        ([p("p0"), p("p1")], "no_ready_decode"),
        ([a()], "no_ready_decode"),
        ([p(), n("d0", "decode")], "connectors_differ"),
        ([n("p0", "prefill"), d()], "connectors_differ"),
        ([n("p0", "prefill"), n("d0", "decode", connector="nixl-push")], "connectors_differ"),
        ([p(revision="a"), d(revision="b")], "revisions_differ"),
        ([p(revision="a"), d()], "revisions_differ"),
        ([p(revision="a"), n("d0", "decode", revision="a")], "connectors_differ"),
    ],
)
def test_split_falls_back_and_says_why(workers: list[WorkerView], reason: str) -> None:
    decision = split(REQUEST, fleet(*workers))
    assert (decision.choice, decision.prefill, decision.reason) == ("local", None, reason)
    assert decision.decode in decision.why


def test_a_worker_that_may_pin_no_more_prefills_for_nobody() -> None:
    decision = split(REQUEST, fleet(p("p0", pinned_full=True), p("p1", num_prefills=9), d()))
    assert (decision.choice, decision.prefill) == ("split", "p1")


@pytest.mark.parametrize("code", sorted(NOT_SPLIT.keys() - NO_PARTNER))
def test_what_cannot_be_split_is_not(code: str) -> None:
    decision = split(RequestView(id="r", unsplittable=code), fleet(p(), d()))
    assert (decision.choice, decision.reason) == ("local", code)


@pytest.mark.parametrize("name", POLICIES)
def test_nobody_ready(name: str) -> None:
    with pytest.raises(UnavailableError, match="No worker is ready"):
        POLICIES[name](REQUEST, fleet(p(ready=False), d(ready=False)))


WORKERS = st.lists(
    st.builds(
        WorkerView,
        name=st.uuids().map(str),
        prefer=st.sampled_from(["prefill", "decode", "any"]),
        ready=st.booleans(),
        kv=st.sampled_from([None, KV]),
        connector=st.sampled_from(["tollbridge", "nixl"]),
        revision=st.sampled_from(["", "a", "b"]),
        suspect=st.booleans(),
        num_prefills=st.integers(0, 3),
        num_decodes=st.integers(0, 3),
    ),
    max_size=6,
    unique_by=lambda worker: worker.name,
)


@given(WORKERS, st.sampled_from(sorted(POLICIES)))
def test_any_fleet(workers: list[WorkerView], name: str) -> None:
    """Chosen workers are ready and distinct, prefill can be dialled, and the order of the fleet does not matter."""
    ready = {worker.name: worker for worker in workers if worker.ready}
    if not ready:
        with pytest.raises(UnavailableError):
            POLICIES[name](REQUEST, fleet(*workers))
        return
    decision = POLICIES[name](REQUEST, fleet(*workers))
    assert decision == POLICIES[name](REQUEST, fleet(*reversed(workers)))
    assert decision.decode in ready
    assert (decision.prefill is None) == (decision.choice == "local")
    if decision.prefill is not None:
        assert ready[decision.prefill].can_send_to(ready[decision.decode])
        assert ready[decision.prefill].revision == ready[decision.decode].revision
        assert ready[decision.prefill].prefer != "decode"
        assert ready[decision.decode].prefer != "prefill"
