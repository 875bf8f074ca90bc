from __future__ import annotations

import asyncio
import random

import pytest

from tests.support.router_rig import happens, rig
from tests.support.stub_worker import Behaviour
from tollbridge.clock import ManualClock
from tollbridge.config.cluster import TenantConfig
from tollbridge.errors import DeadlineError, OverloadedError, UnavailableError
from tollbridge.router.admission import Admission

WHOLE = {"prompt": "Hello", "max_tokens": 8}


def admission(*, most: int = 1, waiting: int = 10, clock: ManualClock | None = None) -> Admission:
    return Admission(
        {"default": 1.0, "other": 1.0},
        clock=clock or ManualClock(),
        max_in_flight=most,
        max_waiting=waiting,
        max_waiting_bytes=1000,
    )


def place(  # type: ignore[no-untyped-def]
    a: Admission,
    *,
    tenant: str = "default",
    num_bytes: int = 10,
    patience_s: float = 5.0,
    left_s: float | None = None,
):
    return a.place(tenant, work=1, num_bytes=num_bytes, patience_s=patience_s, left_s=left_s)


async def test_one_waits_and_gets_the_place_that_becomes_free() -> None:
    a = admission()
    order = []

    async def ask(name: str) -> None:
        async with place(a):
            order.append(name)

    async with place(a) as waited_s:
        assert waited_s == 0.0
        tasks = [asyncio.create_task(ask(name)) for name in "ab"]
        await asyncio.sleep(0)
        assert a.statistics().waiting == 2
        a.check()
    await asyncio.gather(*tasks)
    assert order == ["a", "b"]
    assert (a.statistics().in_flight, a.statistics().waiting_bytes) == (0, 0)


async def test_bounds_in_number_and_bytes() -> None:
    a = admission(waiting=1)
    async with place(a):
        task = asyncio.create_task(place(a).__aenter__())
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="1 requests in flight and 1 waiting"):
            await place(a).__aenter__()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with pytest.raises(OverloadedError):
            await place(a, num_bytes=1001).__aenter__()
    a.check()


async def test_patience_ends_and_leaves_nothing_behind() -> None:
    a = admission()
    async with place(a):
        with pytest.raises(UnavailableError, match=r"0\.01 s"):
            await place(a, patience_s=0.01).__aenter__()
        assert a.statistics().waiting == 0
    async with place(a):
        a.check()


async def test_a_deadline_ends_the_wait_and_says_so() -> None:
    a = admission()
    async with place(a, left_s=60.0):
        with pytest.raises(DeadlineError):
            await place(a, left_s=0.01).__aenter__()
        a.check()
    with pytest.raises(DeadlineError):  # it passed while the body came: no place, though one is free
        await place(a, left_s=0.0).__aenter__()
    assert (a.statistics().in_flight, a.statistics().waiting) == (0, 0)


async def test_a_tenant_that_fills_the_queue_keeps_nobody_out() -> None:
    a = admission(waiting=2)
    order: list[str] = []

    async def ask(tenant: str, name: str) -> None:
        async with place(a, tenant=tenant):
            order.append(name)

    async with place(a):
        flood = [asyncio.create_task(ask("default", name)) for name in "ab"]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await place(a).__aenter__()  # its own
        other = asyncio.create_task(ask("other", "c"))
        await asyncio.sleep(0)
        a.check()
        with pytest.raises(OverloadedError):
            await flood[1]
        with pytest.raises(OverloadedError):  # as many as the flood has left
            await place(a, tenant="other").__aenter__()
        assert a.statistics().waiting == 2
    await asyncio.gather(flood[0], other)
    assert sorted(order) == ["a", "c"]
    assert (a.statistics().in_flight, a.statistics().waiting_bytes) == (0, 0)


async def test_retry_after_follows_the_drain_rate() -> None:
    clock = ManualClock()
    a = admission(clock=clock)
    assert a.retry_after_s() == 1.0
    for _ in range(4):
        async with place(a):
            clock.advance(10.0)
    clock.advance(10.0)
    assert a.retry_after_s() == 10.0  # one place every ten seconds
    async with place(a):
        tasks = [asyncio.create_task(place(a).__aenter__()) for _ in range(3)]
        await asyncio.sleep(0)
        assert a.retry_after_s() == 40.0
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("waiting", [1000, 4])
async def test_cancelled_at_any_moment_no_place_is_lost(waiting: int) -> None:
    rng = random.Random(1)
    a = admission(most=3, waiting=waiting)

    async def ask() -> None:
        async with place(a, tenant=rng.choice(["default", "other"]), patience_s=rng.choice([0.001, 5.0])):
            await asyncio.sleep(rng.random() * 0.002)

    tasks = [asyncio.create_task(ask()) for _ in range(300)]
    while not all(task.done() for task in tasks):
        rng.choice(tasks).cancel()
        a.check()
        await asyncio.sleep(0.0005)
    await asyncio.gather(*tasks, return_exceptions=True)
    a.check()
    assert (a.statistics().in_flight, a.statistics().waiting, a.statistics().waiting_bytes) == (0, 0, 0)


class TestThroughTheRouter:
    async def test_a_request_waits_its_turn_and_says_so(self) -> None:
        async with rig(max_concurrent=1) as r:
            gate = asyncio.Event()
            r["d0"].behaviour["local"] = r["p0"].behaviour["local"] = Behaviour(hold=gate)
            first = asyncio.create_task(r.post(WHOLE, x_request_id="first"))
            await r.until("/fleet", lambda fleet: fleet["in_flight"] == 1)
            second = asyncio.create_task(r.post(WHOLE, x_request_id="second"))
            await r.until("/fleet", lambda fleet: fleet["waiting"] == 1)
            assert await r.metric("waiting_requests") in (0, 1)
            gate.set()
            assert (await first).status == (await second).status == 200
            assert "queue_s" not in (await first).decision
            assert (await second).decision["queue_s"] > 0
            assert (await r.record("second"))["happened"]["queue_s"] > 0
            assert await r.metric("queue_seconds_count", tenant="default") == 2

    async def test_too_long_in_the_queue(self) -> None:
        async with rig(max_concurrent=1, queue_timeout_s=0.05) as r:
            r["d0"].behaviour["local"] = r["p0"].behaviour["local"] = Behaviour("hang")
            first = asyncio.create_task(r.post(WHOLE))
            await r.until("/fleet", lambda fleet: fleet["in_flight"] == 1)
            answer = await r.post(WHOLE)
            assert (answer.status, answer.json["error"]["type"]) == (503, "unavailable")
            assert int(answer.headers["Retry-After"]) >= 1
            assert await r.metric("refused_requests_total", status="503") == 1
            first.cancel()
            await r.until("/fleet", lambda fleet: fleet["in_flight"] == 0)

    async def test_a_client_that_leaves_the_queue_frees_its_place(self) -> None:
        async with rig(max_concurrent=1) as r:
            gate = asyncio.Event()
            r["d0"].behaviour["local"] = r["p0"].behaviour["local"] = Behaviour(hold=gate)
            first = asyncio.create_task(r.post(WHOLE))
            await r.until("/fleet", lambda fleet: fleet["in_flight"] == 1)
            leaver = asyncio.create_task(r.post(WHOLE))
            await r.until("/fleet", lambda fleet: fleet["waiting"] == 1)
            leaver.cancel()
            await r.until("/fleet", lambda fleet: fleet["waiting"] == 0)
            gate.set()
            assert (await first).status == 200
            assert sum(len(worker.seen) for worker in r.workers.values()) == 1

    async def test_a_deadline_that_passes_in_the_queue(self) -> None:
        async with rig(max_concurrent=1) as r:
            r["d0"].behaviour["local"] = r["p0"].behaviour["local"] = Behaviour("hang")
            first = asyncio.create_task(r.post(WHOLE))
            await r.until("/fleet", lambda fleet: fleet["in_flight"] == 1)
            answer = await r.post(WHOLE, x_request_timeout="0.2")
            assert (answer.status, answer.json["error"]["type"]) == (504, "deadline_exceeded")
            first.cancel()

    async def test_deadlines(self) -> None:
        async with rig() as r:
            for name in ("d0", "p0"):
                r[name].behaviour["local"] = Behaviour("stall", after=1)
            for timeout_s in ("0.2", "2", "20"):  # on a busy machine the first may be over before the first token
                answer = await r.post(WHOLE | {"stream": True}, x_request_timeout=timeout_s)
                if answer.status == 200:
                    break
            assert answer.events[-1]["error"]["type"] == "deadline_exceeded"
            for name in ("d0", "p0"):
                r[name].behaviour["local"] = Behaviour("hang")
            for timeout_s in ("0.1", "1", "10"):  # the same
                answer = await r.post(WHOLE, x_request_timeout=timeout_s)
                assert answer.status == 504
                if f"{timeout_s} s" in answer.error:
                    break
            await happens(r["d0"].departed["local"])
            for bad in ("0", "-1", "soon", "1e9", "nan"):
                assert (await r.post(WHOLE, x_request_timeout=bad)).status == 400

    async def test_tenants_have_names_and_keys_stay_secret(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("DEBUG")
        tenants = [TenantConfig(name="team-a", keys=["key-of-team-a"], weight=2.0)]
        async with rig(tenants=tenants, api_keys=["key-of-nobody-special"]) as r:
            r["d0"].behaviour["local"] = r["p0"].behaviour["local"] = Behaviour("die")
            assert (await r.post(WHOLE)).status == 401
            assert (await r.post(WHOLE, authorization="Bearer key-of-team-b")).status == 401
            assert (await r.post(WHOLE, authorization="Bearer key-of-team-a\u00e9")).status == 401
            auth = {"authorization": "Bearer key-of-team-a"}
            assert (await r.post(WHOLE, x_request_id="theirs", **auth)).status == 502
            async with r.session.get(f"{r.url}/decisions/theirs", headers=auth) as response:
                record = await response.json()
            assert record["happened"]["tenant"] == "team-a"
            assert await r.metric("queue_seconds_count", tenant="team-a") == 1
            shown = (
                str([vars(entry) for entry in caplog.records]) + (await r.get("/metrics")).body.decode() + str(record)
            )
            async with r.session.get(f"{r.url}/fleet", headers=auth) as response:
                shown += await response.text()
            assert "key-of-" not in shown
            assert "team-a" in str([vars(entry) for entry in caplog.records])
