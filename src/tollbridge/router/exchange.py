"""A request to a worker and its answer, on a connection of their own for as long as they last.

A stream does not wake a task for each of its chunks: `Answer.pour` hands what has been read to a function at once, from
within the event loop's own callback. That is what the relay's speed rests on. Whoever takes may `pause` the worker;
without a taker an answer is kept up to a bound, and then the worker is paused, too.

The end comes once: the whole answer, a broken connection, an error in what was taken, or "enough". A connection may
serve again only after a whole answer to a whole request; everything else closes it, which tells the worker to stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from tollbridge.errors import UpstreamError
from tollbridge.router.fleet import Worker
from tollbridge.router.http1 import AnswerParser, MalformedError

Take = Callable[[bytes], bool]  # whether it wants more

MAX_KEPT_BYTES = 256 << 10  # of an answer that nobody takes; one read of the socket may come on top
_PIECE_BYTES = 256 << 10  # of a request body, written before looking whether the worker takes it
_QUOTED = 300  # characters of an error's own words


class StaleError(UpstreamError):
    """A connection that had been kept ended before it answered: nobody knows whether the request was seen."""


class Answer:
    """What comes back. The head is there; the body is read in one of two ways, or not at all."""

    def __init__(self, worker: Worker, exchange: Exchange) -> None:
        self._worker = worker
        self._exchange = exchange
        self._kept: list[bytes] = []
        self._num_kept_bytes = 0
        self._take: Take | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self.has_ended = False
        self.status = 0
        self.content_type = ""

    # --- for the reader

    async def readany(self) -> bytes:
        """Return what has come of the body, b"" at its end; UpstreamError when it is cut off."""
        await self._until(lambda: bool(self._kept))
        if not self._kept and self._error is not None:
            raise self._error
        return self._take_kept()

    async def pour(self, take: Take) -> None:
        """Call `take` with every piece of the body as it comes, until it wants no more or the body ends.

        What `take` raises is raised here, UpstreamError when the body is cut off. It is called from the event loop: it
        must not block.
        """
        if self._kept and not take(self._take_kept()):
            self.end(None)
        self._take = take
        await self._until(lambda: False)
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        """Read no more from the worker for now."""
        self._exchange.pause()

    def resume(self) -> None:
        if not self.has_ended:
            self._exchange.resume()

    # --- for the connection

    async def head(self) -> None:
        """Wait for the head; UpstreamError when none comes."""
        await self._until(lambda: bool(self.status))
        if not self.status and self._error is not None:
            raise self._error

    def began(self, status: int, content_type: str) -> None:
        self.status, self.content_type = status, content_type
        self._wake()

    def fed(self, data: bytes) -> None:
        """Hand on a piece of the body, or keep it for the one who will ask."""
        if self._take is None:
            self._kept.append(data)
            self._num_kept_bytes += len(data)
            if self._num_kept_bytes > MAX_KEPT_BYTES:
                self._exchange.pause()
            self._wake()
            return
        try:
            wants_more = self._take(data)
        except Exception as error:  # noqa: BLE001 (we are in the loop's callback: the task that pours raises it)
            self.end(error)
            return
        if not wants_more:
            self.end(None)

    def end(self, error: Exception | None) -> None:
        if not self.has_ended:
            self.has_ended, self._error = True, error
            self._wake()

    def broken(self, detail: str) -> None:
        """The connection ended, or what came over it was no HTTP."""
        kind = StaleError if self._exchange.was_kept and not self._exchange.heard else UpstreamError
        self.end(kind(f"Worker {self._worker.name} broke off its answer: {detail[:_QUOTED]}."))

    # --- inside

    async def _until(self, is_there: Callable[[], bool]) -> None:
        while not self.has_ended and not is_there():
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take_kept(self) -> bytes:
        data = self._kept[0] if len(self._kept) == 1 else b"".join(self._kept)
        self._kept.clear()
        self._num_kept_bytes = 0
        self.resume()
        return data


class Exchange(asyncio.Protocol):
    """One connection to a worker. `ask`, read the answer, then keep it if `is_reusable`, else `abort`."""

    def __init__(self) -> None:
        self._parser = AnswerParser()
        self._answer: Answer | None = None
        self._room: asyncio.Future[None] | None = None  # whoever writes waits for it
        self._is_full = False
        self._is_paused = False
        self._is_sent = True
        self._transport: asyncio.Transport
        self.was_kept = False  # the present request is not its first
        self.heard = False  # something of the present answer
        self.is_open = False
        self.idle_since_s = 0.0

    async def ask(self, worker: Worker, head: bytes, body: bytes) -> Answer:
        """Send a request and return its answer once the head is there; UpstreamError when none comes."""
        self._parser.reset()
        self.heard = False
        answer = self._answer = Answer(worker, self)
        if self.is_open:
            await self._send(answer, head, body)
        else:
            answer.broken("the connection was closed")
        await answer.head()
        return answer

    @property
    def is_reusable(self) -> bool:
        """Whether the answer is whole, and nothing speaks against another request."""
        parser = self._parser
        return self.is_open and self._is_sent and parser.is_complete and parser.keeps_alive and not parser.surplus

    def keep(self, now_s: float) -> None:
        """Nobody uses the connection for now: what comes over it closes it."""
        self._answer = None
        self.was_kept, self.idle_since_s = True, now_s
        self.resume()

    def abort(self) -> None:
        """Close at once, whatever is still under way."""
        self._answer = None
        if self.is_open:
            self.is_open = False
            self._transport.abort()

    def pause(self) -> None:
        if not self._is_paused and self.is_open:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused and self.is_open:
            self._is_paused = False
            self._transport.resume_reading()

    # --- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        answer, parser = self._answer, self._parser
        if answer is None:
            self.abort()
            return
        self.heard = True
        try:
            body = parser.feed(data)
        except MalformedError as error:
            answer.broken(str(error))
            self._let_write()
            return
        if not answer.status and parser.status:
            self._begin(answer)
        if body and not answer.has_ended:
            answer.fed(body)
        if parser.is_complete:
            answer.end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._let_write()
        if self._answer is None:
            return
        try:
            self._parser.end()
        except MalformedError as error:
            self._answer.broken(str(exc or error))
        else:
            self._answer.end(None)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._let_write()

    # --- inside

    def _begin(self, answer: Answer) -> None:
        self._let_write()  # an answer that comes early does not care for the rest of the request
        encoding = self._parser.headers.get(b"content-encoding", b"identity")
        if encoding != b"identity":
            answer.broken(f"it is encoded ({encoding[:40]!r}), which the router did not allow")
            return
        answer.began(self._parser.status, self._parser.content_type)

    async def _send(self, answer: Answer, head: bytes, body: bytes) -> None:
        """Write head and body; a long body piece by piece, as the worker takes it, until it answers."""
        self._is_sent = False
        self._transport.write(head + body[:_PIECE_BYTES])
        for at in range(_PIECE_BYTES, len(body), _PIECE_BYTES):
            await self._until_room(answer)
            if answer.status or answer.has_ended:
                return
            self._transport.write(body[at : at + _PIECE_BYTES])
        self._is_sent = True

    async def _until_room(self, answer: Answer) -> None:
        while self._is_full and self.is_open and not answer.status and not answer.has_ended:
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    def _let_write(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
