"""⑥ From the decode leg's answer to the client: I/O around the pure `stream.EventFilter`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
from aiohttp import web

from tollbridge.errors import UnavailableError, UpstreamError
from tollbridge.router.client import Client
from tollbridge.router.context import Context
from tollbridge.router.fleet import Worker
from tollbridge.router.outcome import Outcome
from tollbridge.router.stream import EventFilter, take_report, usage_of
from tollbridge.router.upstream import Deadline, failure_in_event, failure_of, worker_errors
from tollbridge.wire import sse

EVENT_STREAM = "text/event-stream"


class Relay:
    """Relays the answers of one request's attempts.

    `begin` is called before the first byte leaves and may raise; `finish` is called before the last.
    """

    def __init__(
        self,
        context: Context,
        client: Client,
        outcome: Outcome,
        *,
        begin: Callable[[], None],
        finish: Callable[[], Awaitable[None]],
    ) -> None:
        self._context = context
        self._client = client
        self._outcome = outcome
        self._begin = begin
        self._finish = finish
        self._idle_s = context.config.router.idle_timeout_s
        self._has_spoken = False  # the worker of the present attempt

    async def answer(
        self,
        worker: Worker,
        response: aiohttp.ClientResponse,
        limit: Deadline,
        *,
        hide_usage: bool = False,
        passed: Callable[[bytes], bytes] | None = None,
    ) -> web.StreamResponse:
        """Relay `response`, whatever its kind; UnavailableError when the worker failed.

        With `hide_usage` the client did not ask for the usage chunk of the stream; `passed` may change its events.
        """
        if response.status == 200 and response.content_type == EVENT_STREAM:
            events = EventFilter(self._context.limits.max_event_bytes, hide_usage=hide_usage, passed=passed)
            return await self._stream(worker, response, limit, events)
        return await self._whole(worker, response, limit)

    async def finish(self, rest: bytes) -> web.StreamResponse:
        """End a stream whose worker was lost when all but `rest` had been sent."""
        self._outcome.answered(200)
        await self._finish()
        return await self._client.end_stream(rest)

    async def _whole(self, worker: Worker, response: aiohttp.ClientResponse, limit: Deadline) -> web.StreamResponse:
        """Relay an answer that is not streamed, or the worker's refusal of the client's mistake."""
        limit.extend(self._idle_s)
        body = await self._context.upstream.read(worker, response)
        failure = failure_of(worker, response.status, body)
        if failure is not None:
            raise failure
        if self._client.response is not None:
            detail = body[:200].decode(errors="replace")
            raise UnavailableError(f"Worker {worker.name} refused to continue a stream ({response.status}): {detail}")
        self._begin()
        self._outcome.came_whole()
        body, report = take_report(body)
        self._outcome.usage = usage_of(body)
        if response.status == 200:
            self._outcome.decode_done(report)
            self._context.fleet.succeeded(worker)
        self._outcome.answered(response.status)
        limit.waiting_for_client = True
        await self._finish()
        return await self._client.send_whole(response.status, response.content_type, body, self._outcome.header())

    async def _stream(
        self, worker: Worker, response: aiohttp.ClientResponse, limit: Deadline, events: EventFilter
    ) -> web.StreamResponse:
        """Relay a stream, event by event. The head leaves with the first event: until then a retry is possible."""
        self._has_spoken = False
        async for data in _pieces(worker, response, events):
            if not self._has_spoken:
                self._has_spoken = True
                self._context.fleet.succeeded(worker)  # not only at the end: a breaker would wait for it
            if self._client.response is None:
                self._begin()
                await self._client.begin_stream(self._outcome.header())
            limit.waiting_for_client = True
            await self._client.write(data)
            limit.waiting_for_client = False
            self._outcome.num_chunks += 1
            limit.extend(self._idle_s)
        limit.waiting_for_client = True
        self._refuse_failure(worker, events)
        return await self._end(worker, events)

    async def _end(self, worker: Worker, events: EventFilter) -> web.StreamResponse:
        self._outcome.usage = events.usage()
        self._outcome.decode_done(events.report)
        if events.error:
            return await self._end_with_error(worker, events.error)
        if not events.finished or self._client.response is None:
            raise UpstreamError(f"Worker {worker.name} ended its stream before [DONE].")
        self._outcome.answered(200)
        self._context.fleet.succeeded(worker)
        await self._finish()
        return await self._client.end_stream()

    async def _end_with_error(self, worker: Worker, error: bytes) -> web.StreamResponse:
        """Relay an error event that is the client's to see."""
        if self._client.response is None:
            self._begin()
            await self._client.begin_stream(self._outcome.header())
        self._outcome.failed(200, f"Worker {worker.name} ended its stream with an error event.")
        await self._finish()
        return await self._client.end_stream(sse.event(error) + sse.DONE)

    @staticmethod
    def _refuse_failure(worker: Worker, events: EventFilter) -> None:
        """A stream that ends with an error event is a failed leg, which may be retried or continued."""
        failure = failure_in_event(worker, events.error) if events.error else None
        if failure is not None:
            raise failure


async def _pieces(worker: Worker, response: aiohttp.ClientResponse, events: EventFilter) -> AsyncIterator[bytes]:
    """Yield what may be relayed, as it comes: several events at once when the worker is faster than the client."""
    content = response.content
    while True:
        with worker_errors(worker):
            chunk = await content.readany()
        if not chunk:
            return
        if data := events.feed(chunk):
            yield data
        if events.error:
            return
