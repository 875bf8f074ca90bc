"""Splits over vLLM's own connectors: which leg goes when, with what, and what happens when it does not work out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import msgspec
import pytest

from tests.support.router_rig import PATIENCE_S, QUICK, Rig, happens, rig
from tests.support.stub_nixl import Link, NixlWorker
from tests.support.stub_worker import Behaviour, StubWorker
from tollbridge.router.limits import Limits

STREAM: dict[str, Any] = {"prompt": "Hello", "max_tokens": 8, "stream": True}
WHOLE: dict[str, Any] = {"prompt": "Hello", "max_tokens": 8}


@asynccontextmanager
async def pair(
    connector: Literal["nixl", "nixl-push"] = "nixl", *more: StubWorker, limits: Limits = QUICK
) -> AsyncIterator[tuple[Rig, NixlWorker, NixlWorker]]:
    link = Link()
    p, d = NixlWorker("p0", "prefill", link, connector), NixlWorker("d0", "decode", link, connector)
    async with rig(p, d, *more, limits=limits, policy="split") as r:
        yield r, p, d


class TestPull:
    @pytest.mark.parametrize("body", [STREAM, WHOLE])
    async def test_decode_is_told_what_prefill_answered(self, body: dict[str, Any]) -> None:
        async with pair() as (r, p, d):
            answer = await r.post(body, x_request_id="one")
            assert answer.decision["choice"] == "split"
            (to_p,), (to_d,) = p.seen, d.seen
            assert to_p.body["kv_transfer_params"]["do_remote_decode"] is True
            assert (to_p.body["stream"], to_p.body["max_tokens"]) == (False, 1)
            params = to_d.body["kv_transfer_params"]
            assert (params["remote_engine_id"], params["remote_block_ids"]) == ("engine-of-p0", [[1, 2]])
            assert "remote_prefill_cached_tokens" not in params  # or decode would report prefill's figure as its own
            assert d.in_turn == [True]
            assert not p.link.held
            happened = (await r.record("one"))["happened"]
            assert happened["split_verified"] is True
            assert "kv_transfer_params" not in answer.body.decode()

    async def test_split_that_did_not_happen_is_told(self) -> None:
        async with pair() as (r, _, d):
            d.known = set()
            answer = await r.post(WHOLE, x_request_id="one")
            assert answer.decision["verified"] is False
            assert "computed the rest" in (await r.record("one"))["happened"]["error"]
            assert await r.metric("split_unverified_total", reason="not_loaded") == 1

    async def test_prefill_without_the_connector(self) -> None:
        async with pair() as (r, p, d):
            p.configured = False
            answer = await r.post(STREAM, x_request_id="one")
            assert answer.text == "Hello world"
            assert (answer.decision["choice"], answer.decision["reason"]) == ("local", "no_handover")
            assert d.roles() == ["local"]
            assert await r.metric("retries_total", reason="no_handover") == 1
            why = (await r.record("one"))["decision"]["why"]
            assert why.startswith("On p0 prefill answered no kv_transfer_params")

    @pytest.mark.parametrize(
        ("behaviour", "reason"),
        [
            (Behaviour("error", status=500), "prefill_failed"),
            (Behaviour("die"), "prefill_failed"),
            (Behaviour("error", status=400), "prefill_refused"),
        ],
    )
    async def test_failed_prefill(self, behaviour: Behaviour, reason: str) -> None:
        async with pair() as (r, p, d):
            p.behaviour["prefill"] = behaviour
            answer = await r.post(STREAM)
            assert answer.text == "Hello world"
            assert answer.decision["reason"] == reason
            assert d.roles() == ["local"]

    async def test_client_that_leaves_between_the_legs_strands_nothing(self) -> None:
        async with pair() as (r, p, d):
            d.behaviour["decode"] = Behaviour("hang")
            d.link.free = lambda request_id: None  # type: ignore[method-assign]  # it has not fetched yet
            request = asyncio.create_task(r.post(STREAM))
            await happens(d.arrived["decode"])
            assert d.in_turn == [True]
            del d.link.free
            request.cancel()
            async with asyncio.timeout(PATIENCE_S):
                assert (await p.link.freed.get()).startswith("cmpl-")
            assert not p.link.held

    async def test_client_that_leaves_during_prefill(self) -> None:
        async with pair() as (r, p, d):
            p.behaviour["prefill"] = Behaviour("hang")
            request = asyncio.create_task(r.post(STREAM))
            await happens(p.arrived["prefill"])
            request.cancel()
            await happens(p.departed["prefill"])
            assert d.seen == []

    async def test_decode_that_dies(self) -> None:
        async with pair("nixl", NixlWorker("d1", "decode", Link())) as (r, _, d):
            d.behaviour["decode"] = r["d1"].behaviour["decode"] = Behaviour("die")
            answer = await r.post(STREAM)
            assert answer.text == "Hello world"
            assert answer.decision["reason"] == "decode_failed"


class TestPush:
    async def test_in_turn_until_prefill_has_said_where_it_listens(self) -> None:
        async with pair("nixl-push") as (r, p, d):
            for number in range(3):
                await r.post(STREAM, x_request_id=f"r{number}")
                assert (await r.record(f"r{number}"))["happened"]["split_verified"] is True
            assert d.in_turn == [True, False, False]
            assert [seen.headers["x-request-id"] for seen in p.seen] == [
                seen.headers["x-request-id"] for seen in d.seen
            ]

    async def test_ids_of_attempts_differ(self) -> None:
        """A left-over of an earlier request with the client's id must never match."""
        async with pair("nixl-push") as (r, p, _):
            for _ in range(2):
                await r.post(STREAM, x_request_id="same")
            ids = {seen.headers["x-request-id"] for seen in p.seen}
            assert len(ids) == 2
            assert all(id_.startswith("same-") for id_ in ids)

    async def test_restarted_prefill_is_noticed(self) -> None:
        async with pair("nixl-push") as (r, p, d):
            await r.post(STREAM)
            p.engine_id = "another"
            p.behaviour["prefill"] = Behaviour()
            d.behaviour["decode"] = Behaviour("hang")  # it waits for the engine that is gone
            answer = await r.post(STREAM)
            assert answer.text == "Hello world"
            assert answer.decision["reason"] == "prefill_restarted"
            d.behaviour.clear()
            assert (await r.post(STREAM)).decision["choice"] == "split"
            assert d.in_turn[-1] is False

    async def test_worker_that_went_down_is_asked_again(self) -> None:
        async with pair("nixl-push") as (r, p, d):
            await r.post(STREAM)
            p.healthy = False
            await r.until_ready("p0", False)
            p.healthy = True
            await r.until_ready("p0")
            await r.post(STREAM)
            assert d.in_turn == [True, True]

    async def test_prefill_ends_its_work_for_a_client_that_left(self) -> None:
        """Decode frees the blocks of a request that waited for KV only once the KV has been written."""
        async with pair("nixl-push") as (r, p, d):
            await r.post(STREAM)
            hold = asyncio.Event()
            p.behaviour["prefill"] = Behaviour(hold=hold)
            client = asyncio.create_task(r.post(STREAM, x_request_id="left"))
            while len(p.seen) + len(d.seen) < 4:
                await asyncio.sleep(0.01)
            client.cancel()
            await r.until("/decisions/left", lambda record: record["happened"].get("status") is not None)
            hold.set()
            await happens(p.link.completion(p.seen[-1].headers["x-request-id"]))

    async def test_prefill_that_decode_does_not_know_of_leaves_with_its_client(self) -> None:
        async with pair("nixl-push") as (r, p, d):
            p.behaviour["prefill"] = Behaviour("hang")
            client = asyncio.create_task(r.post(STREAM))
            await happens(p.arrived["prefill"])
            client.cancel()
            await happens(p.departed["prefill"])
            assert not d.seen

    async def test_kv_that_never_comes_is_not_waited_for(self) -> None:
        limits = msgspec.structs.replace(QUICK, push_patience_s=0.2)
        async with pair("nixl-push", limits=limits) as (r, _, d):
            d.behaviour["decode"] = Behaviour("hang")
            answer = await r.post(STREAM)
            assert answer.text == "Hello world"
            assert answer.decision["reason"] == "kv_never_came"


async def test_workers_of_different_connectors_are_not_paired() -> None:
    async with rig(NixlWorker("p0", "prefill", Link()), StubWorker("d0", "decode"), policy="split") as r:
        answer = await r.post(STREAM)
        assert answer.text == "Hello world"
        assert (answer.decision["choice"], answer.decision["reason"]) == ("local", "connectors_differ")


async def test_each_prefill_worker_finds_its_partner() -> None:
    link = Link()
    workers = [NixlWorker("p0", "prefill", link), StubWorker("p1", "prefill")]
    workers += [NixlWorker("d0", "decode", link), StubWorker("d1", "decode")]
    async with rig(*workers, policy="split") as r:
        pairs = set()
        for _ in range(4):
            decision = (await r.post(STREAM)).decision
            assert decision["choice"] == "split"
            pairs.add((decision["prefill"], decision["decode"]))
        assert pairs == {("p0", "d0"), ("p1", "d1")}
