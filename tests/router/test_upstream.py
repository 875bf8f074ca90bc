"""The client towards the workers, against sockets that do as they are told."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme

from tests.support.router_rig import PATIENCE_S
from tollbridge.config.cluster import WorkerConfig
from tollbridge.errors import UpstreamError
from tollbridge.router.exchange import MAX_KEPT_BYTES, Exchange
from tollbridge.router.fleet import Worker
from tollbridge.router.limits import Limits
from tollbridge.router.upstream import Upstream, deadline

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Scripted:
    """A worker that runs `script` for each connection. `gone` is set when a client has left."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.num_connections = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.gone = asyncio.Event()
        self.worker = Worker(config=WorkerConfig(name="w0", url="http://w0:1"), url="")

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._script(reader, writer)
            while await reader.read(1 << 16):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.gone.set()
            writer.transport.abort()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # the transports close in the next rounds of the loop


@asynccontextmanager
async def scripted(
    script: Script, tls: ssl.SSLContext | None = None, **limits: float
) -> AsyncIterator[tuple[Upstream, Scripted]]:
    served = Scripted(script)
    server = await asyncio.start_server(served, "127.0.0.1", 0, ssl=tls)
    scheme = "https" if tls else "http"
    served.worker.url = f"{scheme}://localhost:{server.sockets[0].getsockname()[1]}"
    async with (
        asyncio.timeout(PATIENCE_S),
        server,
        Upstream(Limits(**{"connect_timeout_s": PATIENCE_S} | limits)) as upstream,
    ):  # type: ignore[arg-type]
        try:
            yield upstream, served
        finally:
            await served.close()


async def request_of(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0] or 0)
    return head + await reader.readexactly(size)


def saying(*answers: bytes, then_close: bool = False) -> Script:
    """One answer per request."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await request_of(reader)
            writer.write(answer)
        if then_close:
            writer.close()

    return script


async def ask(upstream: Upstream, worker: Worker, method: str = "POST", body: bytes = b"{}") -> tuple[int, bytes]:
    async with upstream.request(worker, method, "/path", body=body) as answer:
        return answer.status, await upstream.read(worker, answer)


async def test_a_connection_serves_again_after_a_whole_answer() -> None:
    chunked = b"HTTP/1.1 404 No\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nno\r\n0\r\n\r\n"
    async with scripted(saying(OK, chunked, OK)) as (upstream, w):
        assert [await ask(upstream, w.worker) for _ in range(3)] == [(200, b"ok"), (404, b"no"), (200, b"ok")]
        assert w.num_connections == 1
        assert upstream.statistics().reuses_total == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        OK + b"\0",
        OK + OK,
    ],
    ids=["close", "old", "garbage", "answers nobody asked for"],
)
async def test_when_it_does_not(answer: bytes) -> None:
    async with scripted(saying(answer)) as (upstream, w):
        for _ in range(2):
            try:
                assert await ask(upstream, w.worker) == (200, b"ok")
            except UpstreamError as error:
                assert answer.endswith(b"\0")
                assert "w0 broke off" in error.message
        assert w.num_connections == 2
        assert upstream.statistics().num_idle == 0


async def test_bytes_on_an_idle_connection_close_it() -> None:
    said = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await saying(OK)(reader, writer)
        await said.wait()
        writer.write(OK)

    async with scripted(script) as (upstream, w):
        await ask(upstream, w.worker)
        said.set()
        await w.gone.wait()
        await ask(upstream, w.worker)
        assert w.num_connections == 2


async def test_idle_connections_are_closed_in_time() -> None:
    async with scripted(saying(OK), keepalive_s=0.0) as (upstream, w):
        await ask(upstream, w.worker)
        await asyncio.sleep(0.01)  # the event loop counts in milliseconds
        await ask(upstream, w.worker)
        assert w.num_connections == 2
        await w.gone.wait()


async def test_a_kept_connection_that_went_stale_is_made_up_for_where_that_is_harmless() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await saying(OK)(reader, writer)
        await reader.readexactly(1)  # of the next request: gone as it comes
        writer.transport.abort()

    async with scripted(script) as (upstream, w):
        for _ in range(3):
            assert await ask(upstream, w.worker, "GET") == (200, b"ok")
        with pytest.raises(UpstreamError, match="w0 broke off its answer"):
            await ask(upstream, w.worker, "POST")


async def test_an_answer_may_end_with_its_connection() -> None:
    async with scripted(saying(b"HTTP/1.1 200 OK\r\n\r\nok", then_close=True)) as (upstream, w):
        assert await ask(upstream, w.worker) == (200, b"ok")


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\n", OK[:-1], STREAM + b"5\r\nab", b"SSH-2.0\r\n"])
async def test_half_an_answer_is_an_error_that_names_the_worker(answer: bytes) -> None:
    async with scripted(saying(answer, then_close=True)) as (upstream, w):
        with pytest.raises(UpstreamError, match=r"Worker w0 broke off its answer: .+"):
            await ask(upstream, w.worker)


async def test_an_encoded_answer_is_refused() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\nok"
    async with scripted(saying(answer)) as (upstream, w):
        with pytest.raises(UpstreamError, match="gzip"):
            await ask(upstream, w.worker)
        await w.gone.wait()


async def test_a_long_body_goes_out_as_the_worker_takes_it() -> None:
    body = bytes(range(256)) * (1 << 14)  # 4 MiB
    seen = bytearray()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.extend(await request_of(reader))
        writer.write(OK)

    async with scripted(script) as (upstream, w):
        assert await ask(upstream, w.worker, body=body) == (200, b"ok")
        assert seen.endswith(b"\r\n\r\n" + body)
        assert upstream.statistics().num_idle == 1


async def test_a_refusal_before_the_body_is_taken() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        await writer.drain()
        await asyncio.Event().wait()  # and reads no more

    async with scripted(script) as (upstream, w):
        assert await ask(upstream, w.worker, body=bytes(64 << 20)) == (413, b"no")
        assert upstream.statistics().num_idle == 0, "the rest of the body is still owed"


async def test_an_answer_that_nobody_reads_stops_its_worker() -> None:
    sent = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await request_of(reader)
        writer.write(STREAM)
        while sent < 256 << 20:
            writer.write(b"10000\r\n" + bytes(0x10000) + b"\r\n")
            await writer.drain()
            sent += 0x10000
        writer.write(b"0\r\n\r\n")

    async with scripted(script) as (upstream, w):
        async with upstream.request(w.worker, "POST", "/", body=b"") as answer:
            before = -1
            while before != sent:
                before = sent
                await asyncio.sleep(0.05)
            assert sent < 64 << 20, "what the kernel holds, and no more"
            assert len(await answer.readany()) < 4 * MAX_KEPT_BYTES
        await w.gone.wait()


async def test_pouring_hands_over_each_piece_and_stops_when_told() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(STREAM)
        for _ in range(3):
            writer.write(b"1\r\nx\r\n")
            await reader.readexactly(1)

    async with scripted(script) as (upstream, w):
        taken: list[bytes] = []
        async with upstream.request(w.worker, "POST", "/", body=b"") as answer:

            def take(data: bytes) -> bool:
                taken.append(data)
                if len(taken) == 2:
                    return False
                answer._exchange._transport.write(b".")
                return True

            await answer.pour(take)
        assert taken == [b"x", b"x"]
        await w.gone.wait()


async def test_what_a_taker_raises_reaches_the_one_who_pours() -> None:
    async with scripted(saying(STREAM + b"1\r\nx\r\n")) as (upstream, w):

        def take(data: bytes) -> bool:
            raise ZeroDivisionError(data)

        with pytest.raises(ZeroDivisionError, match="x"):
            async with upstream.request(w.worker, "POST", "/", body=b"") as answer:
                await answer.pour(take)
        await w.gone.wait()


@pytest.mark.parametrize("when", ["before the head", "in the body", "pouring"])
async def test_whoever_is_cancelled_closes_the_connection(when: str) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(b"" if when == "before the head" else STREAM)
        limit.extend(0.05)

    async with scripted(script) as (upstream, w):
        with pytest.raises(UpstreamError, match=r"w0 sent nothing for 0.05 s"):
            async with (
                deadline(w.worker, PATIENCE_S) as limit,
                upstream.request(w.worker, "POST", "/", body=b"") as answer,
            ):
                await (answer.pour(lambda _: True) if when == "pouring" else upstream.read(w.worker, answer))
        await w.gone.wait()


async def test_a_deadline_moves_both_ways() -> None:
    worker = Worker(config=WorkerConfig(name="w0", url="http://w0:1"), url="")
    now = asyncio.get_running_loop().time
    start_s = now()
    with pytest.raises(UpstreamError, match=r"nothing for 0.1 s"):
        async with deadline(worker, 0.05) as limit:
            limit.extend(60.0)
            await asyncio.sleep(0.06)
            limit.extend(0.1)
            await asyncio.Event().wait()
    assert 0.15 < now() - start_s < PATIENCE_S


async def test_nobody_there() -> None:
    async with scripted(saying(OK)) as (upstream, w):
        w.worker.url = "http://127.0.0.1:1"
        with pytest.raises(UpstreamError, match=r"w0 at http://127.0.0.1:1 cannot be reached: .*refused"):
            await ask(upstream, w.worker)


async def test_tls_is_the_same_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ca = trustme.CA()
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert("localhost").configure_cert(tls)
    async with scripted(saying(OK, OK), tls) as (upstream, w):
        with pytest.raises(UpstreamError, match=r"cannot be reached: .*certificate"):
            await ask(upstream, w.worker)
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    async with scripted(saying(OK, OK), tls) as (upstream, w):
        assert await ask(upstream, w.worker, body=bytes(2 << 20)) == (200, b"ok")
        assert await ask(upstream, w.worker) == (200, b"ok")
        assert w.num_connections == 1


class FullTransport(asyncio.Transport):
    """Is full from the first byte on: of a socket nobody knows when it is."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._exchange.pause_writing()


@pytest.mark.parametrize("answer", [b"SSH-2.0\r\n", b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\n\r\n", OK])
async def test_an_answer_of_any_kind_ends_the_wait_for_room(answer: bytes) -> None:
    exchange = Exchange()
    exchange.connection_made(FullTransport(exchange))
    worker = Worker(config=WorkerConfig(name="w0", url="http://w0:1"), url="")
    asked = asyncio.create_task(exchange.ask(worker, b"", bytes(1 << 20)))
    await asyncio.sleep(0)
    exchange.data_received(answer)
    async with asyncio.timeout(PATIENCE_S):
        if answer == OK:
            assert (await asked).status == 200
        else:
            with pytest.raises(UpstreamError, match="w0 broke off its answer"):
                await asked


async def test_a_worker_that_has_left_keeps_no_connection() -> None:
    """A message to it may be under way when it is forgotten."""
    async with scripted(saying(OK)) as (upstream, w):
        async with upstream.request(w.worker, "POST", "/path", body=b"{}") as answer:
            w.worker.left = True
            upstream.forget(w.worker)
            await upstream.read(w.worker, answer)
        await w.gone.wait()
        assert upstream.statistics().num_idle == 0
