"""⑥ From the decode leg's answer to the client: I/O around the pure `stream.EventFilter`.

The first event decides, in the request's task: until then a retry is possible. What follows goes straight through a
`Pipe`, called by the event loop when the worker's socket has something, while the task waits for the end. A client that
reads slowly stops the worker's socket, so that at most two buffers wait for it, and has to take one within the idle
timeout.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from tollbridge.clock import Clock
from tollbridge.errors import UnavailableError, UpstreamError
from tollbridge.router.client import Client
from tollbridge.router.context import Context
from tollbridge.router.exchange import Answer
from tollbridge.router.fleet import Worker
from tollbridge.router.outcome import Outcome
from tollbridge.router.stream import EventFilter, take_report, usage_of
from tollbridge.router.upstream import Deadline, failure_in_event, failure_of
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
        self._last_s: float | None = None  # when the stream was written to, by whichever worker's pipe
        self._whole_stream: EventFilter | None = None  # the one whose [DONE] the client has

    @property
    def is_complete(self) -> bool:
        """Whether the client has all of a stream."""
        return self._whole_stream is not None

    async def answer(
        self,
        worker: Worker,
        answer: Answer,
        limit: Deadline,
        *,
        hide_usage: bool = False,
        passed: Callable[[bytes], bytes] | None = None,
    ) -> web.StreamResponse:
        """Relay `answer`, whatever its kind; UnavailableError when the worker failed.

        With `hide_usage` the client did not ask for the usage chunk of the stream; `passed` may change its events.
        """
        if answer.status == 200 and answer.content_type == EVENT_STREAM:
            events = EventFilter(self._context.limits.max_event_bytes, hide_usage=hide_usage, passed=passed)
            return await self._stream(worker, answer, limit, events)
        return await self._whole(worker, answer, limit)

    async def finish(self, rest: bytes) -> web.StreamResponse:
        """End a stream whose worker was lost when all but `rest` had been sent."""
        if self._whole_stream is not None:
            self._note(self._whole_stream)
        self._outcome.answered(200)
        await self._finish()
        return await self._client.end_stream(rest)

    async def _whole(self, worker: Worker, answer: Answer, limit: Deadline) -> web.StreamResponse:
        """Relay an answer that is not streamed, or the worker's refusal of the client's mistake."""
        limit.extend(self._idle_s)
        body = await self._context.upstream.read(worker, answer)
        failure = failure_of(worker, answer.status, body)
        if failure is not None:
            raise failure
        if self._client.response is not None:
            detail = body[:200].decode(errors="replace")
            raise UnavailableError(f"Worker {worker.name} refused to continue a stream ({answer.status}): {detail}")
        self._begin()
        self._outcome.came_whole()
        body, report = take_report(body)
        self._outcome.usage = usage_of(body)
        if answer.status == 200:
            self._outcome.decode_done(report)
            self._context.fleet.succeeded(worker)
        self._outcome.answered(answer.status)
        limit.waiting_for_client = True
        await self._finish()
        return await self._client.send_whole(answer.status, answer.content_type, body, self._outcome.header())

    async def _stream(self, worker: Worker, answer: Answer, limit: Deadline, events: EventFilter) -> web.StreamResponse:
        """Relay a stream, event by event. The head leaves with the first event: until then a retry is possible."""
        first = await _first(answer, events)
        if first:
            self._context.fleet.succeeded(worker)  # not only at the end: a breaker would wait for it
            pipe = Pipe(answer, events, self._client, limit, self._idle_s, self._context.clock, self._last_s)
            try:
                if self._client.response is None:
                    self._begin()
                    await pipe.begin(self._outcome.header(), first)
                else:
                    pipe.write(first)
                if not events.error:
                    await answer.pour(pipe)
            finally:
                self._last_s = pipe.last_s
                self._whole_stream = events if pipe.is_complete else None
                self._outcome.relayed(pipe.num_chunks, pipe.longest_gap_s)
        limit.waiting_for_client = True
        self._refuse_failure(worker, events)
        return await self._end(worker, events)

    async def _end(self, worker: Worker, events: EventFilter) -> web.StreamResponse:
        self._note(events)
        if events.error:
            return await self._end_with_error(worker, events.error)
        if not events.finished or self._client.response is None:
            raise UpstreamError(f"Worker {worker.name} ended its stream before [DONE].")
        self._outcome.answered(200)
        self._context.fleet.succeeded(worker)
        await self._finish()
        return await self._client.end_stream()

    def _note(self, events: EventFilter) -> None:
        self._outcome.usage = events.usage()
        self._outcome.decode_done(events.report)

    async def _end_with_error(self, worker: Worker, error: bytes) -> web.StreamResponse:
        """Relay an error event that is the client's to see."""
        if self._client.response is None:
            self._begin()
            await self._client.begin_stream(self._outcome.header(), b"")
        self._outcome.failed(200, f"Worker {worker.name} ended its stream with an error event.")
        await self._finish()
        return await self._client.end_stream(sse.event(error) + sse.DONE)

    @staticmethod
    def _refuse_failure(worker: Worker, events: EventFilter) -> None:
        """A stream that ends with an error event is a failed leg, which may be retried or continued."""
        failure = failure_in_event(worker, events.error) if events.error else None
        if failure is not None:
            raise failure


class Pipe:
    """Takes what the worker says and writes what the client may see, at once."""

    def __init__(
        self,
        answer: Answer,
        events: EventFilter,
        client: Client,
        limit: Deadline,
        idle_s: float,
        clock: Clock,
        last_s: float | None,
    ) -> None:
        """`last_s` is when the stream was last written to, by an earlier pipe; None: never."""
        self._answer, self._events, self._client, self._limit = answer, events, client, limit
        self._idle_s, self._clock = idle_s, clock
        self.num_chunks = 0
        self.longest_gap_s = 0.0
        self.last_s = last_s
        self.is_complete = False  # [DONE] has been sent

    def __call__(self, data: bytes) -> bool:
        """Pass on the events that `data` completes; False behind an error event."""
        whole = self._events.feed(data)
        if whole:
            self.write(whole)
        return not self._events.error

    async def begin(self, header: str, whole: bytes) -> None:
        """Send the head and the first whole events; ClientGoneError."""
        self._limit.waiting_for_client = True
        await self._client.begin_stream(header, whole)
        self._limit.waiting_for_client = False
        self._sent()

    def write(self, whole: bytes) -> None:
        """Send whole events, several at once when the worker is faster than we are; ClientGoneError."""
        self._client.write(whole)
        self._sent()

    def _sent(self) -> None:
        now_s = self._clock.monotonic()
        if self.last_s is not None and now_s - self.last_s > self.longest_gap_s:
            self.longest_gap_s = now_s - self.last_s
        self.last_s = now_s
        self.is_complete = self._events.finished
        self.num_chunks += 1
        self._limit.extend(self._idle_s)
        if self._client.is_full and not self._limit.waiting_for_client:
            self._limit.waiting_for_client = True
            self._answer.pause()
            self._client.call_when_free(self._go_on)

    def _go_on(self) -> None:
        self._limit.waiting_for_client = False
        self._limit.extend(self._idle_s)
        self._answer.resume()


async def _first(answer: Answer, events: EventFilter) -> bytes:
    """Return the first events that may be relayed, b"" when the stream ends without any."""
    while chunk := await answer.readany():
        data = events.feed(chunk)
        if data or events.error:
            return data
    return b""
