"""The HTTP client towards the workers. Every failure becomes an UpstreamError that names the worker.

Connections are kept after whole answers, the newest serves first, and those that were idle for too long are closed when
their worker is next asked, which the health monitor does every second. TLS is the same path: the event loop does it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from tollbridge.errors import NotFoundError, OverloadedError, TollbridgeError, UnavailableError, UpstreamError
from tollbridge.router.exchange import Answer, Exchange, StaleError
from tollbridge.router.fleet import Worker
from tollbridge.router.http1 import Origin, request_head
from tollbridge.router.limits import Limits

_QUOTED = 300  # characters of a worker's own error message that are passed on


@dataclass(frozen=True, kw_only=True)
class UpstreamStatistics:
    """`num_idle` connections are kept for later; the rest counts since start."""

    num_idle: int
    connects_total: int
    reuses_total: int


class Upstream:
    """One pool of connections for all workers. Use it inside `async with`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._origins: dict[str, Origin] = {}
        self._idle: dict[Origin, deque[Exchange]] = {}  # the newest last
        self._tls: ssl.SSLContext | None = None
        self._connects = self._reuses = 0

    async def __aenter__(self) -> Upstream:
        return self

    async def __aexit__(self, *_: object) -> None:
        for idle in self._idle.values():
            while idle:
                idle.pop().abort()

    @asynccontextmanager
    async def request(
        self,
        worker: Worker,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> AsyncIterator[Answer]:
        """Send a request and yield the answer once its head arrived. Leaving early closes the connection at once,

        which is how a worker learns that nobody wants the rest.
        """
        origin = self._origins.get(worker.url) or self._origins.setdefault(worker.url, Origin.of(worker.url))
        head = request_head(origin, method, path, headers or {}, None if body is None else len(body))
        exchange, answer = await self._ask(worker, origin, head, body or b"", again=method == "GET")
        try:
            yield answer
        except BaseException:
            exchange.abort()
            raise
        if exchange.is_reusable and not worker.left:  # of one that has left, `forget` may have come before
            self._keep(origin, exchange)
        else:
            exchange.abort()

    async def read(self, worker: Worker, answer: Answer) -> bytes:
        """Return the whole body, bounded."""
        pieces: list[bytes] = []
        size = 0
        while piece := await answer.readany():
            size += len(piece)
            if size > self._limits.max_answer_bytes:
                raise UpstreamError(f"Worker {worker.name} sent an answer of more than {size} bytes.")
            pieces.append(piece)
        return b"".join(pieces)

    def forget(self, worker: Worker) -> None:
        """Close the connections to `worker` that nobody uses: it has left, and nobody will ask for it again."""
        origin = self._origins.pop(worker.url, None)
        idle = self._idle.pop(origin, ()) if origin is not None else ()
        for exchange in idle:
            exchange.abort()

    def statistics(self) -> UpstreamStatistics:
        return UpstreamStatistics(
            num_idle=sum(map(len, self._idle.values())), connects_total=self._connects, reuses_total=self._reuses
        )

    # --- inside

    async def _ask(
        self, worker: Worker, origin: Origin, head: bytes, body: bytes, *, again: bool
    ) -> tuple[Exchange, Answer]:
        """Return the exchange and its answer. With `again` a kept connection that was stale is made up for."""
        while True:
            exchange = self._kept(origin) or await self._connect(worker, origin)
            try:
                return exchange, await exchange.ask(worker, head, body)
            except StaleError:
                exchange.abort()
                if not again:
                    raise
            except BaseException:
                exchange.abort()
                raise

    async def _connect(self, worker: Worker, origin: Origin) -> Exchange:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                tls = self._tls_context() if origin.tls else None
                _, exchange = await loop.create_connection(Exchange, origin.host, origin.port, ssl=tls)
        except TimeoutError as error:
            detail = f"no answer to the connect within {self._limits.connect_timeout_s:g} s"
            raise UpstreamError(f"Worker {worker.name} at {worker.url} cannot be reached: {detail}.") from error
        except OSError as error:
            detail = error.strerror or str(error)
            raise UpstreamError(f"Worker {worker.name} at {worker.url} cannot be reached: {detail}.") from error
        self._connects += 1
        return exchange

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    def _kept(self, origin: Origin) -> Exchange | None:
        """Return the connection to `origin` that was used last, None when there is none; close the old ones."""
        idle = self._idle.get(origin)
        if not idle:
            return None
        oldest_s = asyncio.get_running_loop().time() - self._limits.keepalive_s
        while idle and (idle[0].idle_since_s < oldest_s or not idle[0].is_reusable):
            idle.popleft().abort()
        while idle:
            exchange = idle.pop()
            if exchange.is_reusable:
                self._reuses += 1
                return exchange
            exchange.abort()
        return None

    def _keep(self, origin: Origin, exchange: Exchange) -> None:
        exchange.keep(asyncio.get_running_loop().time())
        self._idle.setdefault(origin, deque()).append(exchange)


class ClientGoneError(Exception):
    """The client closed its connection, or stopped reading for too long: nobody is left to answer."""


class Deadline:
    """A deadline that moves on as long as there is progress. Knows whom we wait for, to blame the right side.

    Moving it is an assignment: one timer looks, when it fires, whether the deadline is still where it was.
    """

    def __init__(self, worker: Worker, timeout: asyncio.Timeout, seconds: float) -> None:
        self._worker = worker
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._due_s = self._loop.time() + seconds
        self._timer = self._loop.call_at(self._due_s, self._look)
        self._lost = ""  # why the worker was given up before the deadline
        self.waiting_for_client = False

    def give_up(self, detail: str) -> None:
        """End the wait now: the worker is lost."""
        self._lost = detail
        self._end()

    def extend(self, seconds: float) -> None:
        """Wait up to `seconds` from now, unless the worker is lost."""
        self._due_s = self._loop.time() + seconds
        if seconds < self._seconds:  # the timer would look too late
            self._timer.cancel()
            self._timer = self._loop.call_at(self._due_s, self._look)
        self._seconds = seconds

    def close(self) -> None:
        self._timer.cancel()

    def error(self) -> Exception:
        """Return what a passed deadline means."""
        if self._lost:
            return UpstreamError(f"Worker {self._worker.name} was lost: {self._lost}")
        if self.waiting_for_client:
            return ClientGoneError(f"The client took nothing for {self._seconds:g} s.")
        return UpstreamError(f"Worker {self._worker.name} sent nothing for {self._seconds:g} s: it was given up.")

    def _look(self) -> None:
        if self._loop.time() < self._due_s:
            self._timer = self._loop.call_at(self._due_s, self._look)
        else:
            self._end()

    def _end(self) -> None:
        if not self._timeout.expired():
            self._timeout.reschedule(self._loop.time())


@asynccontextmanager
async def deadline(worker: Worker, seconds: float) -> AsyncIterator[Deadline]:
    """Bound a wait for `worker`; UpstreamError when it passes."""
    try:
        async with asyncio.timeout(None) as timeout:
            limit = Deadline(worker, timeout, seconds)
            worker.waits.add(limit.give_up)
            try:
                yield limit
            finally:
                worker.waits.discard(limit.give_up)
                limit.close()
    except TimeoutError as error:
        raise limit.error() from error


def failure_of(worker: Worker, status: int, body: bytes) -> TollbridgeError | None:
    """Return the error that an answer stands for; None when the answer is the client's to see.

    2xx and the client's own mistakes (most 4xx) pass. A worker that refuses the router's signature or its transfer
    params is a fault of the deployment, not of the client.
    """
    if status < 400:
        return None
    message, param = _said(body)
    text = f"Worker {worker.name} answered {status}: {message}"
    if status == 429:
        return OverloadedError(text)
    if status == 503:
        return UnavailableError(text)
    if status >= 500 or status in (401, 403) or param == "kv_transfer_params":
        return UpstreamError(text)
    if status == 404 and b'"error"' not in body:
        return NotFoundError(f"Worker {worker.name} has no such path: its model or its engine does not offer that.")
    return None


def failure_in_event(worker: Worker, body: bytes) -> TollbridgeError | None:
    """Return the error that a worker's error event stands for; None when it is the client's to see."""
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        error = None
    code = error.code if isinstance(error, _ErrorInfo) else None
    return failure_of(worker, code if isinstance(code, int) else 500, body)


class _ErrorInfo(msgspec.Struct, frozen=True):
    message: str = ""
    param: str | None = None
    code: int | str | None = None


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _ErrorInfo | str | None = None


def _said(body: bytes) -> tuple[str, str | None]:
    """Return the message and param of an OpenAI-shaped error, or the start of whatever it is."""
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        error = None
    if isinstance(error, _ErrorInfo):
        return error.message[:_QUOTED], error.param
    return (error or body[:_QUOTED].decode(errors="replace")), None
