"""The rules that choose one worker."""

from __future__ import annotations

import pytest

from tollbridge.errors import UnavailableError
from tollbridge.policy.registry import find
from tollbridge.policy.routing import kv_cost
from tollbridge.policy.views import FleetView, RequestView, WorkerView

NAMES = ("round-robin", "least-loaded", "dynamo-kv", "kv-aware")


def w(name: str, **more: object) -> WorkerView:
    return WorkerView(name=name, **more)  # type: ignore[arg-type]


def chosen(policy: str, *workers: WorkerView, **request: object) -> str:
    view = RequestView(id="r", **request)  # type: ignore[arg-type]
    decision = find(policy)(view, FleetView(workers=workers))
    assert (decision.policy, decision.choice, decision.prefill) == (policy, "local", None)
    assert decision.decode in decision.why
    return decision.decode


@pytest.mark.parametrize("policy", NAMES)
def test_a_suspect_comes_last_and_the_unready_not_at_all(policy: str) -> None:
    assert chosen(policy, w("a", suspect=True), w("b", ready=False), w("c", num_served=9, num_decodes=9)) == "c"
    assert chosen(policy, w("a", suspect=True), w("b", ready=False)) == "a"
    with pytest.raises(UnavailableError):
        chosen(policy, w("b", ready=False))


def test_round_robin_goes_round() -> None:
    served = {"a": 0, "b": 0, "c": 0}
    order = []
    for _ in range(6):
        views = [w(name, num_served=number, num_decodes=ord(name)) for name, number in served.items()]
        order.append(chosen("round-robin", *views))
        served[order[-1]] += 1
    assert order == ["a", "b", "c"] * 2


def test_least_loaded_is_blind_to_caches() -> None:
    assert chosen("least-loaded", w("a", num_decodes=1), w("b"), prompt_tokens=64, cached={"a": 64}) == "b"


def test_kv_aware_goes_where_the_prefix_is() -> None:
    workers = w("a"), w("b", used_kv_tokens=64)
    assert chosen("kv-aware", *workers, prompt_tokens=512) == "a"
    assert chosen("kv-aware", *workers, prompt_tokens=512, cached={"b": 496}) == "b"


def test_kv_aware_leaves_a_busy_worker_alone() -> None:
    busy = w("b", used_kv_tokens=2000, waiting_prefill_tokens=500)
    assert chosen("kv-aware", w("a"), busy, prompt_tokens=512, cached={"b": 496}) == "a"


def test_kv_aware_waits_where_dynamo_makes_a_copy() -> None:
    """A prompt of 20 blocks, 19 of them cached on a worker with 40 blocks in use: one more copy would evict as many."""
    busy = w("b", used_kv_tokens=40 * 16)
    request = {"prompt_tokens": 320, "cached": {"b": 304}}
    assert chosen("dynamo-kv", w("a"), busy, **request) == "a"
    assert chosen("kv-aware", w("a"), busy, **request) == "b"


def test_a_tie_goes_to_whoever_has_less_to_do() -> None:
    assert chosen("kv-aware", w("a", num_decodes=1), w("b")) == "b"
    assert chosen("kv-aware", w("a", num_served=1), w("b")) == "b"


def test_the_cost_is_dynamos() -> None:
    """(active prefill + prompt - overlap) + active decode + incoming, all in blocks."""
    request = RequestView(id="r", prompt_tokens=320, cached={"a": 160})
    assert kv_cost(request, w("a", waiting_prefill_tokens=64, used_kv_tokens=480)) == (64 + 160) / 16 + 30 + 10
    assert kv_cost(request, w("b", block_size=32)) == 10 + 10
    assert kv_cost(RequestView(id="r", body_bytes=640), w("a")) == 10 + 10
    assert kv_cost(request, w("a", waiting_prefill_tokens=64), weight=2.0) == (64 + 320) / 16 + 20
