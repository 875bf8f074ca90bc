"""What the monitor learns, and how fast."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.router_rig import QUICK, rig
from tests.support.stub_worker import Behaviour, StubWorker
from tollbridge.router.limits import Limits


async def test_new_incarnation_is_noticed() -> None:
    async with rig() as r:
        r["d0"].incarnation, r["d0"].model = "second", "new"
        fleet = await r.until("/fleet", lambda fleet: fleet["workers"][1]["incarnation"] == "second")
        assert fleet["workers"][1]["models"] == ["new"]


async def test_draining_worker_takes_nothing_new() -> None:
    async with rig() as r:
        r["d0"].draining = True
        await r.until_ready("d0", False)
        assert (await r.post({"prompt": "a"})).decision["decode"] == "p0"
        assert "draining" in (await r.get("/health")).json["workers"]["d0"]["detail"]


async def test_worker_that_refuses_is_asked_at_once_whether_it_drains() -> None:
    """Who refuses at once has the fewest requests in flight: until the next check it would get all of them."""
    async with rig(limits=msgspec.structs.replace(QUICK, poll_interval_s=60.0)) as r:
        r["d0"].draining = True
        r["d0"].behaviour["local"] = Behaviour("error", status=503)
        assert (await r.post({"prompt": "a"})).decision["decode"] == "p0"
        await r.until_ready("d0", False)


async def test_worker_without_kv_takes_no_part_in_splits() -> None:
    p0, d0 = StubWorker("p0", "prefill"), StubWorker("d0", "decode")
    p0.kv = None
    async with rig(p0, d0) as r:
        assert (await r.post({"prompt": "a"}, policy="split")).decision["reason"] == "no_ready_prefill"


async def test_worker_that_may_pin_no_more_gets_no_new_splits() -> None:
    async with rig() as r:
        r["p0"].engine = {"num_pinned_blocks": 16, "max_pinned_blocks": 16}
        await r.until("/fleet", lambda fleet: fleet["workers"][0]["status"].get("engine"))
        assert (await r.post({"prompt": "a"}, policy="split")).decision["reason"] == "pinned_bound"
        r["p0"].engine = {"num_pinned_blocks": 15, "max_pinned_blocks": 16}
        await r.until("/fleet", lambda fleet: fleet["workers"][0]["status"]["engine"]["num_pinned_blocks"] == 15)
        assert (await r.post({"prompt": "a"}, policy="split")).decision["choice"] == "split"


async def test_stock_server_is_ready_without_our_status() -> None:
    worker = StubWorker("vllm")
    worker.stock, worker.engine_kind = True, "vllm"
    async with rig(worker) as r:
        assert (await r.post({"prompt": "a"})).decision["decode"] == "vllm"


async def test_a_vllm_that_the_file_takes_for_an_embedded_worker_takes_nothing() -> None:
    """Nobody would read its load, and its streams would be continued as ours are."""
    worker = StubWorker("v0")
    worker.stock = True
    async with rig(worker, StubWorker("d0")) as r:
        assert (await r.post({"prompt": "a"})).decision["decode"] == "d0"
        detail = (await r.get("/health")).json["workers"]["v0"]["detail"]
        assert "write `engine: vllm` for v0" in detail


async def test_a_vllm_without_metrics_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    worker = StubWorker("v0")
    worker.stock, worker.engine_kind = True, "vllm"
    async with rig(worker) as r:
        before = worker.num_asked_for_metrics
        await r.until("/health", lambda _: worker.num_asked_for_metrics > before + 2)
        assert caplog.text.count("says nothing of its load: name=v0") == 1
        worker.metrics = 'vllm:num_requests_running{engine="0"} 3\n'
        await r.until("/fleet", lambda fleet: fleet["workers"][0]["load"]["num_running"] == 3)


async def test_worker_that_is_not_there_yet_does_not_stop_the_router() -> None:
    p0, d0 = StubWorker("p0", "prefill"), StubWorker("d0", "decode")
    async with rig(p0, d0) as r:
        await p0.stop()
        await r.until_ready("p0", False)
        assert "cannot be reached" in (await r.get("/health")).json["workers"]["p0"]["detail"]
        assert (await r.get("/metrics")).body.count(b'worker_ready{worker="p0"} 0.0') == 1
        await p0.start()
        await r.until_ready("p0")


@pytest.mark.parametrize("body", [b"not json", b"[]", b'{"data": 3}'])
async def test_strange_answers_do_not_end_the_watch(body: bytes) -> None:
    async with rig() as r:
        r["d0"].odd_models, r["d0"].incarnation = body, "odd"
        await r.until("/fleet", lambda fleet: fleet["workers"][1]["incarnation"] == "odd")
        r["d0"].odd_models, r["d0"].incarnation = None, "well"
        await r.until("/fleet", lambda fleet: fleet["workers"][1]["models"] == ["stub-model"])


async def test_slow_check_is_forgiven_a_few_times() -> None:
    quick = Limits(poll_interval_s=0.02, check_timeout_s=0.2)
    async with rig(limits=quick) as r:
        await r.until_ready("d0")
        r["d0"].slow_health = True
        await r.until("/fleet", lambda _: r["d0"].num_slow >= 1)
        ready = (await r.get("/health")).json["workers"]["d0"]["ready"]
        assert ready or r["d0"].num_slow >= 3  # three have passed if this machine stood still
        await r.until_ready("d0", False)
        assert r["d0"].num_slow >= 3
        r["d0"].slow_health = False
        await r.until_ready("d0")


async def test_failure_is_checked_at_once() -> None:
    async with rig(limits=Limits(poll_interval_s=60)) as r:
        r["d0"].behaviour["local"] = Behaviour("die")
        r["d0"].healthy = False
        await r.post({"prompt": "a"})
        await r.until_ready("d0", False)
