"""A send that nobody will fetch is given up by a message; a request whose worker hangs is given up too."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tests.support.router_rig import PATIENCE_S, QUICK, happens, rig
from tests.support.stub_worker import SECRET, Behaviour, StubWorker, stubs
from tollbridge.clock import SystemClock
from tollbridge.config.cluster import WorkerConfig
from tollbridge.router import legs, release
from tollbridge.router.fleet import Fleet
from tollbridge.router.limits import Limits
from tollbridge.router.release import MAX_PENDING, Releaser
from tollbridge.router.upstream import Upstream
from tollbridge.wire.params import RELEASE_PATH

STREAM = {"prompt": "Hello", "max_tokens": 8, "stream": True}


async def test_client_that_leaves_before_decode_asked_releases_the_send() -> None:
    async with rig() as r:
        r["d0"].behaviour["decode"] = Behaviour("hang")
        request = asyncio.create_task(r.post(STREAM, policy="split"))
        await happens(r["p0"].arrived["prefill"])
        await happens(r["d0"].arrived["decode"])
        request.cancel()
        async with asyncio.timeout(PATIENCE_S):
            transfer_id = await r["p0"].released.get()
        sent = [seen.body["kv_transfer_params"]["tollbridge"] for seen in r["p0"].seen if seen.role == "prefill"]
        assert transfer_id == sent[0]["transfer_id"]


async def test_decode_that_dies_releases_the_send_and_the_retry_goes_on() -> None:
    stubs = (StubWorker("p0", "prefill"), StubWorker("d0", "decode"), StubWorker("d1", "decode"))
    async with rig(*stubs) as r:
        r["d0"].behaviour["decode"] = Behaviour("die")
        answer = await r.post(STREAM, policy="split")
        assert answer.text == "Hello world"
        async with asyncio.timeout(PATIENCE_S):
            await r["p0"].released.get()


async def test_a_vllm_worker_is_told_by_a_request_of_one_token() -> None:
    stubs = (StubWorker("p0", "prefill"), StubWorker("d0", "decode"), StubWorker("d1", "decode"))
    for stub in stubs:
        stub.engine_kind, stub.stock = "vllm", True
    async with rig(*stubs) as r:
        r["d0"].behaviour["decode"] = Behaviour("die")
        await r.post(STREAM, policy="split")
        async with asyncio.timeout(PATIENCE_S):
            transfer_id = await r["p0"].released.get()
        [leg] = [seen.body for seen in r["p0"].seen if seen.role == "prefill"]
        [release] = [seen for seen in r["p0"].seen if seen.role == "release"]
        assert transfer_id == leg["kv_transfer_params"]["tollbridge"]["transfer_id"]
        assert release.path == "/v1/completions"
        assert (release.body["prompt"], release.body["max_tokens"]) == ([0], 1)
        assert release.body["model"] == r["p0"].model


async def test_verified_split_releases_nothing() -> None:
    async with rig() as r:
        assert (await r.post(STREAM, policy="split")).status == 200
        r["d0"].behaviour["decode"] = Behaviour("error", status=500)
        await r.post(STREAM, policy="split")
        async with asyncio.timeout(PATIENCE_S):
            await r["p0"].released.get()
        assert r["p0"].released.empty()  # the second split's only


async def test_stock_worker_without_the_path_does_no_harm() -> None:
    async with rig() as r:
        r["p0"].stock = True
        r["d0"].behaviour["decode"] = Behaviour("error", status=500)
        assert (await r.post(STREAM, policy="split")).status == 200  # retried locally on p0


async def test_messages_under_way_go_out_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "TIMEOUT_S", PATIENCE_S)
    stub = StubWorker("p0")
    (params,) = legs.params_for(("prefill",), transfer_id="0" * 32, kv=("h", 1), expires=60.0, secret=SECRET)
    body = msgspec.json.encode({"kv_transfer_params": legs.transfer(params)})
    async with stubs(stub), Upstream(QUICK) as upstream:
        releaser = Releaser(upstream)
        releaser.send(Fleet([stub.config], clock=SystemClock())["p0"], RELEASE_PATH, body, transfer=params.transfer_id)
        await releaser.close()
        assert stub.released.get_nowait() == params.transfer_id


async def test_messages_under_way_are_bounded_and_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "MAX_PENDING", 4)
    monkeypatch.setattr(release, "TIMEOUT_S", 0.1)
    writers: list[asyncio.StreamWriter] = []

    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)

    hung = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = hung.sockets[0].getsockname()[1]
    workers = [WorkerConfig(name="p0", url=f"http://127.0.0.1:{port}")]
    fleet = Fleet(workers, clock=SystemClock())
    async with Upstream(Limits()) as upstream:
        releaser = Releaser(upstream)
        for _ in range(14):
            releaser.send(fleet["p0"], RELEASE_PATH, b"{}", transfer="0" * 32)
        assert len([task for task in asyncio.all_tasks() if task.get_name() == "release-send"]) == 4
        async with asyncio.timeout(PATIENCE_S):
            await releaser.close()
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "release-send"]
    hung.close()
    for writer in writers:
        writer.transport.abort()
    await asyncio.sleep(0.01)  # the transports close in the next rounds of the loop


async def test_worker_that_hangs_with_open_connections_is_given_up() -> None:
    """As after SIGSTOP: the kernel still takes connections, nobody answers."""
    limits = msgspec.structs.replace(QUICK, check_timeout_s=0.5, timeouts_until_lost=3)
    async with rig(limits=limits) as r:
        for name in ("p0", "d0"):
            r[name].names_ids = False  # so the stream cannot go on elsewhere
            r[name].behaviour["local"] = Behaviour("stall", after=1)
        ask = asyncio.create_task(r.post(STREAM))
        serving = {asyncio.create_task(r[name].arrived["local"].wait()): name for name in ("p0", "d0")}
        done, pending = await asyncio.wait(serving, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE_S)
        for task in pending:
            task.cancel()
        name = serving[done.pop()]
        r[name].slow_health = True
        answer = await ask
        assert answer.events[-1] != "[DONE]"
        assert f"Worker {name} was lost" in answer.body.decode()


async def test_legs_that_go_on_are_bounded_and_end_with_their_owner() -> None:
    """One more than may go on ends with its caller; `close` ends the others."""
    async with Upstream(Limits()) as upstream:
        releaser = Releaser(upstream)
        ended: list[int] = []

        async def leg(number: int) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(number)

        callers = [asyncio.create_task(releaser.outlive(leg(number))) for number in range(MAX_PENDING + 1)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        await asyncio.sleep(0)
        assert ended == [MAX_PENDING]
        await releaser.close()
        assert sorted(ended) == list(range(MAX_PENDING + 1))
