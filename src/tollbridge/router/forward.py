"""Requests that any ready worker can answer and that take no part in a split: tokenize, embeddings and the like.

Of these only a response is streamed: its events pass as they come, so a worker that fails within it is not replaced,
and the stream ends with an error event.
"""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from tollbridge.errors import (
    DeadlineError,
    OverloadedError,
    TollbridgeError,
    UnavailableError,
    UnsupportedError,
    UpstreamError,
)
from tollbridge.policy.rules import least_loaded
from tollbridge.router import legs
from tollbridge.router.context import Context
from tollbridge.router.exchange import Answer
from tollbridge.router.fleet import Worker
from tollbridge.router.ingress import Call
from tollbridge.router.relay import EVENT_STREAM
from tollbridge.router.stream import end_of_last_event, take_report
from tollbridge.router.upstream import ClientGoneError, Deadline, deadline, failure_of
from tollbridge.wire.openai import error_body

RESPONSES = "/v1/responses"
# Named one by one: a worker's administrative paths must not become reachable through the router.
PATHS = ("/tokenize", "/detokenize", "/v1/embeddings", "/v1/score", "/v1/rerank", RESPONSES)

_STREAM_HEADERS = {
    "Content-Type": f"{EVENT_STREAM}; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would otherwise hold tokens back
}


async def forward(context: Context, call: Call, http: web.Request, left_s: float | None) -> web.StreamResponse:
    """Return the answer of the least loaded ready worker that serves the call's model, within `left_s`.

    UnsupportedError for a stream where these paths have none.
    """
    if call.stream and call.path != RESPONSES:
        raise UnsupportedError(f"The router does not stream {call.path}: leave stream out.", param="stream")
    worker = context.fleet[least_loaded(context.fleet.view(call.model).ready(), first="decode").name]
    stream = _Stream(http, context.limits.max_event_bytes, context.config.router.idle_timeout_s)
    try:
        async with asyncio.timeout(left_s):
            return await _ask(context, call, worker, stream)
    except (ClientGoneError, ConnectionResetError):
        return stream.drop()
    except TimeoutError:
        late = DeadlineError(f"The request did not end within {call.timeout_s:g} s, its deadline.")
        return await stream.fail(late)
    except TollbridgeError as error:
        if isinstance(error, UnavailableError) and not isinstance(error, OverloadedError):
            worker.recheck.set()  # no suspect yet: it may be the path that it fails on
        return await stream.fail(error)


async def _ask(context: Context, call: Call, worker: Worker, stream: _Stream) -> web.StreamResponse:
    body, headers = legs.local_body(call), legs.headers_for(call)
    async with deadline(worker, context.config.router.first_byte_timeout_s) as limit:
        with context.fleet.serving(worker, "decode") as prefilled:
            async with context.upstream.request(worker, "POST", call.path, body=body, headers=headers) as answer:
                if answer.status == 200 and answer.content_type == EVENT_STREAM:
                    prefilled()
                    return await stream.relay(answer, limit)
                whole = await context.upstream.read(worker, answer)
    failure = failure_of(worker, answer.status, whole)
    if failure is not None:
        raise failure
    return web.Response(status=answer.status, body=take_report(whole)[0], content_type=answer.content_type)


class _Stream:
    """The client's side of a stream. A client that takes nothing for `idle_s` is as good as gone, a worker, too."""

    def __init__(self, http: web.Request, max_event_bytes: int, idle_s: float) -> None:
        self._http = http
        self._max_event_bytes = max_event_bytes
        self._rest = b""  # the start of an event: an error event must not come behind half of another
        self._idle_s = idle_s
        self.response: web.StreamResponse | None = None

    async def relay(self, answer: Answer, limit: Deadline) -> web.StreamResponse:
        """Pass on the events of `answer`, no faster than the client reads."""
        response = web.StreamResponse(headers=_STREAM_HEADERS)
        while piece := await answer.readany():
            whole = self._whole_events(piece)
            limit.waiting_for_client = True
            if self.response is None:
                self.response = response
                await response.prepare(self._http)
            await response.write(whole)
            limit.waiting_for_client = False
            limit.extend(self._idle_s)
        limit.waiting_for_client = True
        if self.response is None:
            self.response = response
            await response.prepare(self._http)
        await response.write_eof(self._rest)
        return response

    def _whole_events(self, piece: bytes) -> bytes:
        data = self._rest + piece
        end = end_of_last_event(data)
        self._rest = data[end:]
        if len(self._rest) > self._max_event_bytes:
            raise UpstreamError(f"The worker sent an event of more than {self._max_event_bytes} bytes.")
        return data[:end]

    async def fail(self, error: TollbridgeError) -> web.StreamResponse:
        """End the stream with an error event, in the shape of a response's, and as other streams have it.

        Raises `error` when no stream has begun.
        """
        if self.response is None:
            raise error
        told = error_body(error)
        event = {"type": "error", "code": told.error.type, "message": error.message, "param": None, "error": told.error}
        try:
            async with asyncio.timeout(self._idle_s):
                await self.response.write(b"event: error\ndata: %b\n\n" % msgspec.json.encode(event))
                await self.response.write_eof()
        except (TimeoutError, ConnectionResetError):
            return self.drop()
        return self.response

    def drop(self) -> web.StreamResponse:
        """Close the connection of a client that has left, or does not read."""
        if self._http.transport is not None:
            self._http.transport.abort()
        return self.response or web.Response(status=499)  # nobody reads it
