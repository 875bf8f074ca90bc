from __future__ import annotations

import pytest

from tests.policy.test_rules import REQUEST, a, d, fleet, n, p
from tollbridge.errors import ConfigError, UnavailableError
from tollbridge.policy.decide import after_decode_failure, after_prefill_failure, decide
from tollbridge.policy.views import RequestView


def test_policy_decides() -> None:
    decision = decide(REQUEST, fleet(p(), d()), "split")
    assert (decision.id, decision.policy, decision.choice, decision.reason) == ("r", "split", "split", "policy")


def test_override_is_marked() -> None:
    decision = decide(REQUEST, fleet(p(), d()), "local", "split")
    assert (decision.policy, decision.choice, decision.reason) == ("split", "split", "forced")


def test_override_that_cannot_be_had_keeps_its_reason() -> None:
    decision = decide(REQUEST, fleet(d()), "local", "split")
    assert (decision.choice, decision.reason) == ("local", "no_ready_prefill")


@pytest.mark.parametrize("workers", [(d(),), (p(),)])
def test_fail_instead_of_local(workers: tuple[object, ...]) -> None:
    with pytest.raises(UnavailableError, match='is "fail"') as caught:
        decide(REQUEST, fleet(*workers), "split", on_no_prefill="fail")  # type: ignore[arg-type]
    assert caught.value.status == 503


@pytest.mark.parametrize(
    "workers", [(d(), n("p0", "prefill")), (p(revision="a"), d(revision="b")), (d(), p(pinned_full=True))]
)
def test_fail_concerns_every_want_of_a_partner(workers: tuple[object, ...]) -> None:
    with pytest.raises(UnavailableError, match='is "fail"'):
        decide(REQUEST, fleet(*workers), "split", on_no_prefill="fail")  # type: ignore[arg-type]


def test_fail_does_not_concern_what_the_rule_of_another_system_serves_locally() -> None:
    short = RequestView(id="r", prompt_tokens=100, cached={"d0": 90})
    assert decide(short, fleet(d()), "dynamo-isl", on_no_prefill="fail").choice == "local"
    with pytest.raises(UnavailableError):
        decide(RequestView(id="r", prompt_tokens=4000), fleet(d()), "dynamo-isl", on_no_prefill="fail")


def test_fail_does_not_concern_what_cannot_be_split() -> None:
    request = RequestView(id="r", unsplittable="multimodal")
    assert decide(request, fleet(d()), "split", on_no_prefill="fail").reason == "multimodal"


def test_fail_does_not_concern_local() -> None:
    assert decide(REQUEST, fleet(d()), "local", on_no_prefill="fail").choice == "local"


def test_unknown_policy() -> None:
    with pytest.raises(ConfigError):
        decide(REQUEST, fleet(d()), "adaptiv")


def test_retry_after_prefill_stays_on_decode() -> None:
    retry = after_prefill_failure(decide(REQUEST, fleet(p(), d()), "split"))
    assert (retry.choice, retry.decode, retry.prefill, retry.reason) == ("local", "d0", None, "prefill_failed")
    assert "p0" in retry.why


def test_retry_after_decode_goes_elsewhere() -> None:
    workers = fleet(p(), d("d0"), d("d1"), a())
    first = decide(REQUEST, workers, "split")
    retry = after_decode_failure(first, workers, frozenset({"d0"}))
    assert (retry.choice, retry.decode, retry.reason) == ("local", "d1", "decode_failed")
    with pytest.raises(UnavailableError):
        after_decode_failure(first, fleet(d("d0")), frozenset({"d0"}))
