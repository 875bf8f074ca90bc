"""The HTTP client towards the workers. Every failure becomes an UpstreamError that names the worker."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import aiohttp
import msgspec

from tollbridge.errors import OverloadedError, TollbridgeError, UnavailableError, UpstreamError
from tollbridge.router.fleet import Worker
from tollbridge.router.limits import Limits

_ONE_PIECE_BYTES = 1 << 20
_QUOTED = 300  # characters of a worker's own error message that are passed on


class Upstream:
    """One connection pool for all workers. Use it inside `async with`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Upstream:
        # No limit here: `max_concurrent` bounds the requests, and each has two legs at most.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=self._limits.keepalive_s, ttl_dns_cache=10)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._limits.connect_timeout_s)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, read_bufsize=1 << 18
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    @asynccontextmanager
    async def request(
        self,
        worker: Worker,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield the answer once its head arrived. Leaving early closes the connection at once,

        which is how a worker learns that nobody wants the rest.
        """
        assert self._session is not None
        with worker_errors(worker):
            response = await self._session.request(
                method, worker.url + path, data=_payload(body), headers=headers, allow_redirects=False
            )
        try:
            yield response
        finally:
            response.close()  # returns the connection to the pool if the answer was read to its end

    async def read(self, worker: Worker, response: aiohttp.ClientResponse) -> bytes:
        """Return the whole body, bounded."""
        pieces: list[bytes] = []
        size = 0
        with worker_errors(worker):
            async for piece in response.content.iter_any():
                size += len(piece)
                if size > self._limits.max_answer_bytes:
                    raise UpstreamError(f"Worker {worker.name} sent an answer of more than {size} bytes.")
                pieces.append(piece)
        return b"".join(pieces)


@contextmanager
def worker_errors(worker: Worker) -> Iterator[None]:
    """Translate the client library's errors into UpstreamError."""
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        detail = str(getattr(error, "os_error", "no answer to the connect"))
        raise UpstreamError(f"Worker {worker.name} at {worker.url} cannot be reached: {detail}.") from error
    except aiohttp.ClientError as error:
        detail = str(error) or type(error).__name__
        raise UpstreamError(f"Worker {worker.name} broke off its answer: {detail[:_QUOTED]}.") from error
    except OSError as error:
        raise UpstreamError(f"The connection to worker {worker.name} failed: {error}.") from error


def _payload(body: bytes | None) -> bytes | io.BytesIO | None:
    """Large bodies are written piece by piece: in one piece they would hold up every stream (aiohttp warns)."""
    return io.BytesIO(body) if body is not None and len(body) > _ONE_PIECE_BYTES else body


class ClientGoneError(Exception):
    """The client closed its connection, or stopped reading for too long: nobody is left to answer."""


class Deadline:
    """A deadline that moves on as long as there is progress. Knows whom we wait for, to blame the right side."""

    def __init__(self, worker: Worker, timeout: asyncio.Timeout, seconds: float) -> None:
        self._worker = worker
        self._timeout = timeout
        self._seconds = seconds
        self._now = asyncio.get_running_loop().time
        self._lost = ""  # why the worker was given up before the deadline
        self.waiting_for_client = False

    def give_up(self, detail: str) -> None:
        """End the wait now: the worker is lost."""
        self._lost = detail
        self._timeout.reschedule(self._now())

    def extend(self, seconds: float) -> None:
        """Wait up to `seconds` from now, unless the worker is lost."""
        if self._lost:
            return
        self._seconds = seconds
        self._timeout.reschedule(self._now() + seconds)

    def error(self) -> Exception:
        """Return what a passed deadline means."""
        if self._lost:
            return UpstreamError(f"Worker {self._worker.name} was lost: {self._lost}")
        if self.waiting_for_client:
            return ClientGoneError(f"The client took nothing for {self._seconds:g} s.")
        return UpstreamError(f"Worker {self._worker.name} sent nothing for {self._seconds:g} s: it was given up.")


@asynccontextmanager
async def deadline(worker: Worker, seconds: float) -> AsyncIterator[Deadline]:
    """Bound a wait for `worker`; UpstreamError when it passes."""
    try:
        async with asyncio.timeout(seconds) as timeout:
            limit = Deadline(worker, timeout, seconds)
            worker.waits.add(limit.give_up)
            try:
                yield limit
            finally:
                worker.waits.discard(limit.give_up)
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
