"""The rules of others at their edges, as their sources have them."""

from __future__ import annotations

import pytest

from tests.policy.test_rules import d, fleet, p
from tollbridge.policy.registry import find
from tollbridge.policy.views import RequestView


def choice(policy: str, num_tokens: int, cached: int = 0, **prefill: object) -> str:
    request = RequestView(id="r", prompt_tokens=num_tokens, cached={"d0": cached})
    return find(policy)(request, fleet(p(**prefill), d())).choice


@pytest.mark.parametrize(
    ("policy", "num_tokens", "cached", "expected"),
    [
        ("dynamo-isl", 20, 0, "split"),  # a cold prompt has ratio 1: never local
        ("dynamo-isl", 1000, 310, "local"),
        ("dynamo-isl", 1000, 300, "split"),  # exactly 0.7
        ("dynamo-isl", 10_000, 7952, "split"),  # exactly 2,048
        ("dynamo-isl", 10_000, 7953, "local"),
        ("llm-d", 511, 0, "local"),
        ("llm-d", 512, 0, "split"),
        ("llm-d", 512, 504, "split"),
        ("llm-d", 512, 505, "local"),
        ("vllm-router-256", 256, 0, "local"),
        ("vllm-router-256", 257, 0, "split"),
        ("vllm-router-256", 1000, 744, "local"),
    ],
)
def test_rule(policy: str, num_tokens: int, cached: int, expected: str) -> None:
    assert choice(policy, num_tokens, cached) == expected


def test_dynamo_isl_or_load() -> None:
    loaded = {"max_num_batched_tokens": 512, "waiting_prefill_tokens": 513}
    assert choice("dynamo-isl-or-load", 20) == "split"
    assert choice("dynamo-isl-or-load", 20, **loaded) == "local"
    assert choice("dynamo-isl-or-load", 20, **{**loaded, "waiting_prefill_tokens": 512}) == "split"


def test_local_is_on_the_decode_worker() -> None:
    decision = find("llm-d")(RequestView(id="r", prompt_tokens=20), fleet(p(), d(num_decodes=5)))
    assert (decision.choice, decision.decode, decision.policy) == ("local", "d0", "llm-d")


def test_workers_are_chosen_by_what_they_have() -> None:
    request = RequestView(id="r", prompt_tokens=1000, cached={"d1": 800, "p1": 900})
    decision = find("split")(request, fleet(p("p0"), p("p1"), d("d0"), d("d1", num_decodes=0)))
    assert (decision.prefill, decision.decode) == ("p1", "d1")


def test_without_a_partner_it_says_why() -> None:
    decision = find("dynamo-isl")(RequestView(id="r", prompt_tokens=20), fleet(d()))
    assert (decision.choice, decision.reason, decision.policy) == ("local", "no_ready_prefill", "dynamo-isl")
