"""Links are tried with a prompt of our own, through stub workers; with real vLLM in tests/vllm/test_links.py."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from tests.support.router_rig import QUICK, Rig, rig
from tests.support.stub_worker import Behaviour, StubWorker
from tollbridge.clock import ManualClock
from tollbridge.config.cluster import ClusterConfig, WorkerConfig
from tollbridge.router.app import make_context
from tollbridge.router.learn import _Link
from tollbridge.router.load import Report
from tollbridge.router.trials import Trials
from tollbridge.wire.params import TransferReport

AT_ONCE = msgspec.structs.replace(
    QUICK,
    trial_interval_s=0.02,
    trial_after_s=0.0,
    trial_again_s=1000.0,
    trial_timeout_s=20.0,
    trial_growing_s=0.0,
)
CARD = b'{"object": "list", "data": [{"id": "stub-model", "max_model_len": 8192}]}'


def workers() -> tuple[StubWorker, StubWorker]:
    """A prefill and a decode worker; a transfer carries 1 MB in half a second, beside a prefill of a tenth."""
    pair = StubWorker("p0", "prefill"), StubWorker("d0", "decode")
    transfer = TransferReport(
        transfer_id="", side="receive", outcome="done", num_tokens=99, payload_bytes=1_000_000, wire_s=0.5
    )
    pair[0].report = {"prefill": {"prefill_s": 0.1}}
    pair[1].report = {"decode": {"transfer": transfer, "loaded_tokens": 1 << 20}}
    return pair


async def links(r: Rig) -> Any:
    return await r.until("/fleet", lambda fleet: fleet["cost"]["links"])


async def test_a_link_is_known_before_any_client_has_split() -> None:
    async with rig(*workers(), policy="adaptive", limits=AT_ONCE) as r:
        (known,) = (await links(r))["cost"]["links"].values()
        assert known["goodput_bytes_per_s"] == pytest.approx(2e6)
        assert set(r["p0"].roles()) == {"prefill"}
        assert set(r["d0"].roles()) == {"decode"}
        body = r["d0"].seen[0].body
        assert body["max_tokens"] == 1
        assert body["prompt"] == r["p0"].seen[0].body["prompt"]
        while await r.metric("link_trials_total", outcome="ok") < 2:
            pass
        assert await r.metric("prediction_error_ratio_count", kind="wire") == 0  # nobody predicted it for a client
        assert (await r.get("/decisions")).json["decisions"] == []  # no client's


@pytest.mark.parametrize(("policy", "explore"), [("split", 0.02), ("local", 0.02), ("adaptive", 0.0)])
async def test_nothing_is_tried_where_nobody_asks_for_a_price(policy: str, explore: float) -> None:
    async with rig(*workers(), policy=policy, explore=explore, limits=AT_ONCE) as r:
        for _ in range(30):
            await r.get("/health")
        assert r["p0"].roles() == r["d0"].roles() == []


async def test_a_trial_that_fails_is_counted_and_not_repeated_at_once() -> None:
    pair = workers()
    pair[1].behaviour["decode"] = Behaviour("error", status=500)
    async with rig(*pair, policy="adaptive", limits=AT_ONCE) as r:
        await r["p0"].released.get()  # of KV that nobody fetches
        while not await r.metric("link_trials_total", outcome="failed"):
            pass
        fleet = (await r.get("/fleet")).json
        assert fleet["cost"]["links"] == {}
        assert [worker["num_prefills"] + worker["num_decodes"] for worker in fleet["workers"]] == [0, 0]
        assert r["d0"].roles() == ["decode"]


async def test_kv_that_did_not_cross_teaches_nothing() -> None:
    pair = workers()
    pair[1].report["decode"] = {"transfer": None, "loaded_tokens": 0}
    async with rig(*pair, policy="adaptive", limits=AT_ONCE) as r:
        while not await r.metric("link_trials_total", outcome="failed"):
            pass
        assert (await r.get("/fleet")).json["cost"]["links"] == {}


async def test_a_transfer_that_says_nothing_of_the_link_is_no_success() -> None:
    pair = workers()
    transfer = TransferReport(transfer_id="", side="receive", outcome="done", num_tokens=99, payload_bytes=10, wire_s=1)
    pair[1].report["decode"] = {"transfer": transfer, "loaded_tokens": 1 << 20}
    async with rig(*pair, policy="adaptive", limits=AT_ONCE) as r:
        while not await r.metric("link_trials_total", outcome="failed"):
            pass


async def test_a_worker_that_hangs_ends_the_trial() -> None:
    pair = workers()
    pair[0].behaviour["prefill"] = Behaviour("hang")
    limits = msgspec.structs.replace(AT_ONCE, trial_timeout_s=0.5)
    async with rig(*pair, policy="adaptive", limits=limits) as r:
        await r["p0"].departed["prefill"].wait()
        while not await r.metric("link_trials_total", outcome="failed"):
            pass


async def test_what_is_soon_over_is_followed_by_longer_prompts() -> None:
    pair = workers()
    for worker in pair:
        worker.odd_models = CARD
    limits = msgspec.structs.replace(AT_ONCE, trial_growing_s=1000.0)
    async with rig(*pair, policy="adaptive", limits=limits) as r:
        while await r.metric("link_trials_total", outcome="ok") < 1:
            pass
        assert [len(request.body["prompt"]) for request in r["d0"].seen] == [256, 1024, 2048]


@pytest.mark.parametrize(
    ("longest", "growing_s", "lengths"),
    [(8192, 0.0, {256}), (257, 1000.0, {256}), (1024, 1000.0, {256, 1023}), (None, 1000.0, {256, 512})],
)
async def test_no_longer_prompt_follows_one_that_took_long_or_where_none_fits(
    longest: int | None, growing_s: float, lengths: set[int]
) -> None:
    pair = workers()
    pair[1].odd_models = CARD
    pair[0].odd_models = CARD.replace(b"8192", str(longest).encode()) if longest else None
    limits = msgspec.structs.replace(AT_ONCE, trial_growing_s=growing_s)
    async with rig(*pair, policy="adaptive", limits=limits) as r:
        while await r.metric("link_trials_total", outcome="ok") < 1:
            pass
        assert {len(request.body["prompt"]) for request in r["d0"].seen} == lengths


async def test_a_longer_prompt_that_fails_is_no_failure() -> None:
    pair = workers()
    for worker in pair:
        worker.odd_models = CARD
    pair[0].longest = 500
    limits = msgspec.structs.replace(AT_ONCE, trial_growing_s=1000.0)
    async with rig(*pair, policy="adaptive", limits=limits) as r:
        while await r.metric("link_trials_total", outcome="ok") < 1:
            pass
        assert max(len(request.body["prompt"]) for request in r["p0"].seen) == 1024
        assert await r.metric("link_trials_total", outcome="failed") == 0


async def test_no_longer_prompt_goes_where_others_are_and_it_is_gone_on_with() -> None:
    """What another router's clients do is known from the worker's own report."""
    pair = workers()
    for worker in pair:
        worker.odd_models = CARD
    pair[1].engine = {"num_running": 1}
    limits = msgspec.structs.replace(AT_ONCE, trial_growing_s=1000.0, trial_after_s=0.1)
    async with rig(*pair, policy="adaptive", limits=limits) as r:
        while await r.metric("link_trials_total", outcome="ok") < 2:
            pass
        assert {len(request.body["prompt"]) for request in r["d0"].seen} == {256}
        pair[1].engine = {"num_running": 0}
        while max(len(request.body["prompt"]) for request in r["d0"].seen) < 2048:
            await r.get("/health")


def test_which_link_is_next() -> None:
    """One without room waits, one that failed is tried after a while only, one that is known when nobody is busy."""
    names = ("p0", "prefill"), ("d0", "decode"), ("d1", "decode")
    configs = [WorkerConfig(name=name, prefer=prefer, url="http://127.0.0.1:1", host=name) for name, prefer in names]
    clock = ManualClock()
    context = make_context(ClusterConfig(workers=configs), b"a secret for tests only", limits=AT_ONCE, clock=clock)
    trials = Trials(context)
    assert trials.next_pair() is None  # nobody is ready
    p0, d0, d1 = context.fleet
    for worker in context.fleet:
        worker.kv = ("127.0.0.1", 7)
        worker.models = ({"id": "m"},)
        worker.judge(healthy=True)
    p0.num_decodes = 5
    assert trials.next_pair() is not None  # it may always be busy
    d1.load.told(Report(free_kv_tokens=100), clock.monotonic())
    assert trials.next_pair() == (p0, d0)

    async def refused() -> None:
        async with context.upstream:
            await trials.attempt(p0, d0)

    asyncio.run(refused())
    assert trials.next_pair() is None
    d1.load.told(Report(free_kv_tokens=10_000), clock.monotonic())
    p0.num_decodes = 0
    assert trials.next_pair() == (p0, d1)
    for _ in range(2):  # the first may have waited for a connection
        assert trials.next_pair() == (p0, d1)  # though p0 may be busy
        context.learner.cost.link("p0", "d1").observe(1e6)
    assert trials.next_pair() is None
    d1.models = ({"id": "another"},)
    clock.advance(2000.0)
    assert trials.next_pair() == (p0, d0)
    for _ in range(2):
        context.learner.cost.link("p0", "d0").observe(1e6)
    context.learner.links["p0", "d0"] = _Link(used_s=clock.monotonic())  # and nothing has bounded it
    p0.num_decodes = 5
    assert trials.next_pair() is None  # the link is known, and p0 is busy
    p0.num_decodes = 0
    assert trials.next_pair() == (p0, d0)
    d0.models = ({"id": "another"},)
    assert trials.next_pair() is None
