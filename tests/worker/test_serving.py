"""Streams over a real connection: clients that leave, engines that fail, full doors, slow readers."""

from __future__ import annotations

import asyncio
import json
import socket

import aiohttp
import pytest

from tests.support.fake_engine import FakeEngine, letters, report
from tests.worker.support import Client, eventually, fake_serving, params, serving
from tollbridge.engine.base import EngineRequest, StepOutput
from tollbridge.errors import ContextLengthError, UnavailableError
from tollbridge.wire.params import TransferReport


async def test_client_that_leaves_a_stream_aborts_it(client: Client) -> None:
    client.engine.hold()
    body = json.dumps({"prompt": "hello", "max_tokens": 50, "stream": True})
    task = asyncio.create_task(client.session.post(client.url + "/v1/completions", data=body))
    await eventually(lambda: client.engine.submitted)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: client.engine.aborted)
    assert client.engine.aborted == [client.engine.submitted[0].request_id]
    client.engine.release()
    await eventually(lambda: client.door.num_open == 0)
    await eventually(client.engine.idle.is_set)


async def test_client_that_leaves_mid_stream_aborts_it() -> None:
    def endless(request: EngineRequest):
        while True:
            yield StepOutput(request_id=request.request_id, token_ids=(1,), text="x" * 1000)

    engine = FakeEngine(script=endless)
    try:
        async with serving(engine) as client:
            body = json.dumps({"prompt": "hello", "stream": True})
            async with client.session.post(client.url + "/v1/completions", data=body) as response:
                await response.content.readany()
                response.close()
            await eventually(lambda: engine.aborted)
            await eventually(lambda: client.door.num_open == 0)
    finally:
        engine.shutdown()


async def test_client_that_leaves_a_whole_answer_aborts_it(client: Client) -> None:
    client.engine.hold()
    task = asyncio.create_task(client.post("/v1/completions", {"prompt": "hello"}))
    await eventually(lambda: client.engine.submitted)
    task.cancel()
    await eventually(lambda: client.engine.aborted)


async def test_client_that_does_not_read_is_cut_off() -> None:
    def flood(request: EngineRequest):
        while True:
            yield StepOutput(request_id=request.request_id, token_ids=(1,), text="x" * 100_000)

    engine = FakeEngine(script=flood)
    try:
        async with serving(engine, write_timeout_s=0.05) as client:
            host, port = client.url.removeprefix("http://").split(":")
            body = json.dumps({"prompt": "hello", "stream": True}).encode()
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                await asyncio.to_thread(sock.connect, (host, int(port)))
                sock.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
                )
                await eventually(lambda: engine.aborted)
                await eventually(lambda: client.door.num_open == 0)
    finally:
        engine.shutdown()


def failing_after(num_tokens: int):
    def script(request: EngineRequest):
        outputs = letters(request)
        for _ in range(num_tokens):
            yield next(outputs)
        yield StepOutput(request_id=request.request_id, finish_reason="error", error="The runner tripped.")

    return script


async def test_engine_error_before_the_first_token_is_a_status(client: Client) -> None:
    client.engine.script = failing_after(0)
    for stream in (False, True):
        status, answer = await client.post("/v1/completions", {"prompt": "hello", "stream": stream})
        assert (status, answer["error"]["message"]) == (500, "The runner tripped.")
    assert client.engine.aborted == []


async def test_engine_error_mid_stream_is_an_event(client: Client) -> None:
    client.engine.script = failing_after(2)
    *chunks, last = await client.stream("/v1/completions", {"prompt": "hello"})
    assert len(chunks) == 2
    assert last["error"]["message"] == "The runner tripped."
    assert set(last) == {"error"}


async def test_engine_error_mid_answer_is_a_status(client: Client) -> None:
    client.engine.script = failing_after(2)
    status, _ = await client.post("/v1/completions", {"prompt": "hello"})
    assert status == 500


async def test_engine_that_shuts_down_says_try_another(client: Client) -> None:
    client.engine.hold()
    task = asyncio.create_task(client.post("/v1/completions", {"prompt": "hello", "stream": True}))
    await eventually(lambda: client.engine.submitted)
    client.engine.abort(client.engine.submitted[0].request_id)
    client.engine.release()
    status, answer = await task
    assert (status, answer["error"]["type"]) == (503, "unavailable")


async def test_unforeseen_exception_mid_stream_is_an_event(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tollbridge.worker.answers import CompletionAnswer

    def fail(*_: object, **__: object) -> bytes:
        raise KeyError("the inner secret")

    monkeypatch.setattr(CompletionAnswer, "chunk", fail)
    (last,) = await client.stream("/v1/completions", {"prompt": "hello"})
    assert last["error"]["code"] == 500
    assert "secret" not in last["error"]["message"]
    assert "the inner secret" in caplog.text


async def test_the_engine_may_refuse(client: Client) -> None:
    def refuse(request: EngineRequest) -> None:
        raise ContextLengthError("It does not fit the cache.")

    client.engine.submit = refuse
    status, answer = await client.post("/v1/completions", {"prompt": "hello", "stream": True})
    assert (status, answer["error"]["type"]) == (400, "context_length_exceeded")


async def test_full_door_says_retry_later() -> None:
    async with fake_serving(max_open=2) as client:
        client.engine.hold()
        tasks = [asyncio.create_task(client.complete()) for _ in range(2)]
        await eventually(lambda: len(client.engine.submitted) == 2)
        async with client.session.post(client.url + "/v1/completions", data=b"{}") as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
            assert (await response.json())["error"]["type"] == "overloaded"
        client.engine.release()
        await asyncio.gather(*tasks)
        await client.complete()


async def test_many_streams_at_once(client: Client) -> None:
    body = {"prompt": "hello", "max_tokens": 20}
    streams = await asyncio.gather(*(client.stream("/v1/completions", body) for _ in range(40)))
    texts = {"".join(chunk["choices"][0]["text"] for chunk in chunks) for chunks in streams}
    assert len(texts) == 1
    assert len(texts.pop()) == 20


async def test_report_only_for_the_router(client: Client) -> None:
    body = {"prompt": "hello", "max_tokens": 2}
    *rest, last = await client.stream("/v1/completions", body, **{"x-tollbridge-report": "1"})
    assert last["kv_transfer_params"]["tollbridge"]["role"] == "local"
    assert all("kv_transfer_params" not in chunk for chunk in rest)
    _, whole = await client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
    assert "kv_transfer_params" not in whole


async def test_decode_leg_reports_and_counts_what_it_loaded(client: Client) -> None:
    transfer = TransferReport(transfer_id="0" * 32, side="receive", outcome="done", num_tokens=3, total_s=0.5)

    def loaded(request: EngineRequest):
        from msgspec.structs import replace

        made = replace(report(request, 1), transfer=transfer)
        yield StepOutput(
            request_id=request.request_id, token_ids=(65,), text="A", finish_reason="stop", stop_reason=65, report=made
        )

    client.engine.script = loaded
    answer = await client.complete(kv_transfer_params=params("decode"))
    said = answer["kv_transfer_params"]["tollbridge"]
    assert (said["role"], said["loaded_tokens"], said["transfer"]["outcome"]) == ("decode", 3, "done")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 1 + 3
    assert answer["choices"][0]["stop_reason"] == 65
    assert client.engine.submitted[0].transfer.role == "decode"


async def test_prefill_leg(client: Client) -> None:
    answer = await client.complete(max_tokens=1, kv_transfer_params=params("prefill"))
    assert answer["kv_transfer_params"]["tollbridge"]["role"] == "prefill"


async def test_drain_refuses_new_requests_and_waits_for_old_ones(client: Client) -> None:
    client.engine.hold()
    running = asyncio.create_task(client.complete())
    await eventually(lambda: client.engine.submitted)
    drain = asyncio.create_task(client.door.drain(60.0))
    await eventually(lambda: client.door.draining)
    status, _ = await client.get("/health")
    assert status == 503
    status, answer = await client.post("/v1/completions", {"prompt": "hello"})
    assert (status, answer["error"]["type"]) == (503, "unavailable")
    assert not drain.done()
    client.engine.release()
    await running
    assert await drain is True


async def test_drain_gives_up_after_its_grace(client: Client) -> None:
    client.engine.hold()
    running = asyncio.create_task(client.post("/v1/completions", {"prompt": "hello"}))
    await eventually(lambda: client.engine.submitted)
    assert await client.door.drain(0.01) is False
    client.engine.release()
    await running


async def test_health_follows_the_engine(client: Client) -> None:
    assert (await client.get("/health"))[0] == 200

    def stopped(request: EngineRequest) -> None:
        raise UnavailableError("The engine failed.")

    client.engine.submit = stopped
    status, _ = await client.post("/v1/completions", {"prompt": "hello"})
    assert status == 503
    assert (await client.get("/health"))[0] == 503


async def test_port_in_use_is_a_startup_error(client: Client) -> None:
    from tollbridge.errors import StartupError
    from tollbridge.worker.app import build_app, listen

    port = int(client.url.rpartition(":")[2])
    with pytest.raises(StartupError, match=str(port)):
        await listen(build_app(client.door), client.door.limits, "127.0.0.1", port)


async def test_keep_alive_survives_a_refusal(client: Client) -> None:
    connector = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(connector=connector) as session:
        for data in (b"{", b'{"prompt": "a"}', b"[]", b'{"prompt": "a"}'):
            async with session.post(client.url + "/v1/completions", data=data) as response:
                await response.read()
        assert response.status == 200
