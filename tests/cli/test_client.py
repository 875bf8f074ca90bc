"""The chat client against a fake router: what it sends, streams, and says when the router does not play along."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tollbridge.cli.chat import decision_line
from tollbridge.cli.client import Answer, RouterClient
from tollbridge.errors import RequestError, UnavailableError, UpstreamError
from tollbridge.wire.decision import Decision, DecisionRecord, Happened
from tollbridge.wire.sse import DONE, event

USER = [{"role": "user", "content": "hi"}]


def delta(text: str) -> bytes:
    return event(json.dumps({"choices": [{"delta": {"content": text}}]}).encode())


def record_of(request_id: str, status: str) -> bytes:
    decision = Decision(
        id=request_id, policy="split", choice="split", decode="d0", prefill="p0", reason="forced", why="Asked for it."
    )
    happened = msgspec.convert({"status": status}, Happened)
    return msgspec.json.encode(DecisionRecord(at=1.0, decision=decision, happened=happened))


class FakeRouter:
    """Answers chat requests with `events`; its records are complete at the second look."""

    def __init__(self) -> None:
        self.events = [delta("Hel"), delta("lo"), DONE]
        self.requests: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.looks = 0
        self.url = ""

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((await request.json(), {key.lower(): value for key, value in request.headers.items()}))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for each in self.events:
            await response.write(each)
        return response

    async def record(self, request: web.Request) -> web.Response:
        self.looks += 1
        return web.Response(body=record_of(request.match_info["id"], "running" if self.looks == 1 else "ok"))


Serve = Callable[[Callable[[web.Request], Awaitable[web.StreamResponse]]], Awaitable[str]]


@pytest.fixture
async def router() -> AsyncIterator[FakeRouter]:
    fake = FakeRouter()
    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", fake.chat), web.get("/decisions/{id}", fake.record)])
    async with TestServer(app) as server:
        fake.url = str(server.make_url("/"))
        yield fake


async def ask(url: str, **options: Any) -> Answer:
    async with RouterClient(url) as client:
        return await client.chat(USER, **options)


async def test_an_answer_is_streamed_and_its_record_fetched_when_complete(router: FakeRouter) -> None:
    pieces: list[str] = []
    answer = await ask(router.url, policy="split", max_tokens=5, on_text=pieces.append, temperature=0)
    assert pieces == ["Hel", "lo"]
    assert answer.text == "Hello"
    assert 0 < answer.ttft_s <= answer.total_s
    assert answer.record is not None
    assert answer.record.happened.status == "ok"
    ((body, headers),) = router.requests
    assert body == {"messages": USER, "stream": True, "temperature": 0, "max_tokens": 5}
    assert headers["x-tollbridge-policy"] == "split"
    assert headers["x-request-id"] == answer.record.decision.id


async def test_the_key_goes_along_and_a_v1_in_the_url_does_no_harm(router: FakeRouter) -> None:
    async with RouterClient(f"{router.url}v1/", api_key="sk-1") as client:
        await client.chat(USER)
    assert router.requests[0][1]["authorization"] == "Bearer sk-1"
    assert "x-tollbridge-policy" not in router.requests[0][1]


async def test_an_error_event_ends_the_answer(router: FakeRouter) -> None:
    router.events = [delta("Hel"), event(b'{"error": {"message": "d0 died", "type": "upstream_error"}}')]
    with pytest.raises(UpstreamError, match="the answer broke off: d0 died"):
        await ask(router.url)


@pytest.mark.parametrize(
    ("status", "body", "kind", "sentence"),
    [
        (400, b'{"error": {"message": "No.", "type": "t"}}', RequestError, "the router answered 400: No."),
        (429, b'{"error": {"message": "Full.", "type": "t"}}', UnavailableError, "the router answered 429: Full."),
        (502, b"<html>", UnavailableError, "the router answered 502: <html>"),
        (500, b"", UnavailableError, "the router answered 500: (nothing more)"),
    ],
)
async def test_a_refusal_is_told(status: int, body: bytes, kind: type[Exception], sentence: str) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", refuse)
    async with TestServer(app) as server:
        with pytest.raises(kind) as caught:
            await ask(str(server.make_url("/")))
    assert str(caught.value) == sentence


async def test_a_connection_that_breaks_is_told() -> None:
    async def vanish(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(delta("Hel"))
        assert request.transport is not None
        request.transport.abort()
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", vanish)
    async with TestServer(app) as server:
        with pytest.raises(UpstreamError, match="broke off"):
            await ask(str(server.make_url("/")))


async def test_a_server_without_records_is_fine() -> None:
    async def reply(request: web.Request) -> web.Response:
        return web.Response(body=delta("ok") + DONE)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", reply)
    async with TestServer(app) as server:
        answer = await ask(str(server.make_url("/")))
    assert answer.record is None
    assert decision_line(answer).startswith("[no decision recorded; first token after 0.")


def test_the_decision_line() -> None:
    record = msgspec.json.decode(record_of("r", "ok"), type=DecisionRecord)
    line = decision_line(Answer(text="", ttft_s=0.1234, total_s=2.0, record=record))
    assert line == "[split on p0 -> d0; first token after 0.123 s, all after 2.00 s; Asked for it]"
