"""The routes of the door, and the server that carries them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import generate_latest

import tollbridge
from tollbridge.errors import RequestError, StartupError, UnavailableError
from tollbridge.obs import memory
from tollbridge.wire.connections import Connections
from tollbridge.wire.openai import (
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    ReleaseRequest,
    TokenizeRequest,
    TokenizeResponse,
)
from tollbridge.wire.params import RELEASE_PATH
from tollbridge.wire.status import WorkerStatus
from tollbridge.worker import openapi
from tollbridge.worker.admission import chat_job, completion_job, generate_job, read_body, response_job
from tollbridge.worker.door import Door, Limits
from tollbridge.worker.events import EventPublisher
from tollbridge.worker.faults import errors_as_json
from tollbridge.worker.job import Job
from tollbridge.worker.legs import transfer_params
from tollbridge.worker.messages import chat_options
from tollbridge.worker.parse import parse
from tollbridge.worker.serving import serve

BACKLOG = 2048  # 128 stalls a burst of connections by a second
SHUTDOWN_TIMEOUT_S = 2.0  # for handlers that still write when the server closes; draining has come before

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Admit = Callable[[Door, web.Request, bytes], Awaitable[Job]]


def build_app(door: Door, events: EventPublisher | None = None) -> web.Application:
    """Return the application; it runs `events` while it serves, and owns neither door nor publisher."""
    app = web.Application(middlewares=[errors_as_json], client_max_size=door.limits.max_body_bytes)
    handlers = Handlers(door)
    app.add_routes(
        [
            web.post("/v1/completions", handlers.generating(completion_job)),
            web.post("/v1/chat/completions", handlers.generating(chat_job)),
            web.post("/v1/responses", handlers.generating(response_job)),
            web.post("/inference/v1/generate", handlers.generating(generate_job)),
            web.post("/tokenize", handlers.tokenize),
            web.post("/detokenize", handlers.detokenize),
            web.get("/v1/models", handlers.models),
            web.get("/health", handlers.health),
            web.get("/metrics", handlers.metrics),
            web.get("/version", handlers.version),
            web.get("/tollbridge/status", handlers.status),
            web.get("/openapi.json", handlers.openapi),
            web.post(RELEASE_PATH, handlers.release),
        ]
    )
    if events is not None:
        app.cleanup_ctx.append(_publishing(events))
    return app


class Handlers:
    """One method per path."""

    def __init__(self, door: Door) -> None:
        self._door = door

    def generating(self, admit: Admit) -> Handler:
        """Return the handler of a path that generates: it holds a place from when its body has come."""

        async def handle(http: web.Request) -> web.StreamResponse:
            body = await read_body(http, self._door.bodies)
            with self._door.enter():
                return await serve(self._door, http, await admit(self._door, http, body))

        return handle

    async def tokenize(self, http: web.Request) -> web.Response:
        body = await read_body(http, self._door.bodies)
        with self._door.enter():
            asked = parse(body, TokenizeRequest)
            self._door.check_model(asked.model)
            tokens = await self._tokens(asked)
        strings = self._door.prompts.strings(tokens) if asked.return_token_strs else None
        max_model_len = self._door.engine.info.max_model_len
        return _json(
            TokenizeResponse(count=len(tokens), max_model_len=max_model_len, tokens=tokens, token_strs=strings)
        )

    async def _tokens(self, asked: TokenizeRequest) -> list[int]:
        if (asked.prompt is None) == (asked.messages is None):
            raise RequestError('Send either "prompt" or "messages".', param="prompt")
        prompts = self._door.prompts
        if asked.messages is not None:
            options = chat_options(asked, add_special_tokens=bool(asked.add_special_tokens))
            return await prompts.messages(asked.messages, options)
        return await prompts.tokenize(asked.prompt or "", add_special_tokens=asked.add_special_tokens is not False)

    async def detokenize(self, http: web.Request) -> web.Response:
        body = await read_body(http, self._door.bodies)
        with self._door.enter():
            asked = parse(body, DetokenizeRequest)
            self._door.check_model(asked.model)
            return _json(DetokenizeResponse(prompt=await self._door.prompts.detokenize(asked.tokens)))

    async def models(self, http: web.Request) -> web.Response:
        door = self._door
        cards = [
            ModelCard(
                id=name,
                created=door.started_s,
                root=door.engine.info.name,
                max_model_len=door.engine.info.max_model_len,
            )
            for name in door.identity.model_names
        ]
        return _json(ModelList(data=cards))

    async def health(self, http: web.Request) -> web.Response:
        if self._door.draining:
            raise UnavailableError("This worker is shutting down.")
        if self._door.engine_stopped:
            raise UnavailableError("The engine of this worker has stopped: restart the worker.")
        return web.Response()

    async def metrics(self, http: web.Request) -> web.Response:
        body = generate_latest(self._door.metrics.registry)
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def version(self, http: web.Request) -> web.Response:
        return _json({"version": tollbridge.__version__})

    async def openapi(self, http: web.Request) -> web.Response:
        return _json(openapi.document())

    async def release(self, http: web.Request) -> web.Response:
        """Give up a send that nobody will fetch; only the router can sign for it."""
        body = parse(await read_body(http, self._door.bodies), ReleaseRequest)
        door = self._door
        params = transfer_params(body.kv_transfer_params, secret=door.secret, now_s=door.clock.wall())
        if params is None or params.role != "prefill":
            raise RequestError("A release needs the kv_transfer_params of a prefill leg.", param="kv_transfer_params")
        door.engine.release_send(params.transfer_id)
        return _json({"released": params.transfer_id})

    async def status(self, http: web.Request) -> web.Response:
        return _json(worker_status(self._door))


def worker_status(door: Door) -> WorkerStatus:
    info, identity = door.engine.info, door.identity
    return WorkerStatus(
        name=identity.name,
        model=identity.model_names[0],
        incarnation=identity.incarnation,
        kv=identity.kv,
        events=identity.events,
        replay=identity.replay,
        draining=door.draining,
        num_open=door.num_open,
        max_open=door.limits.max_open,
        max_model_len=info.max_model_len,
        block_size=info.block_size,
        kv_bytes_per_token=info.kv_bytes_per_token,
        rss_bytes=memory.rss_bytes(),
        memory_limit_bytes=memory.limit_bytes(),
        engine=dataclasses.asdict(door.engine.statistics()),
        transfer={side: dataclasses.asdict(statistics) for side, statistics in door.transfers().items()},
    )


@dataclass(frozen=True, kw_only=True)
class Server:
    """A listening door; `stop` closes the port and ends the handlers."""

    runner: web.AppRunner
    server: asyncio.Server
    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def stop(self) -> None:
        self.server.close()
        await self.runner.cleanup()


async def listen(app: web.Application, limits: Limits, host: str, port: int) -> Server:
    """Serve `app`; port 0 chooses one. StartupError when the port cannot be had."""
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # otherwise a client that leaves never reaches the handler
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
    )
    await runner.setup()
    assert runner.server is not None
    connections = Connections(
        runner.server,
        who="worker",
        max_connections=limits.max_connections,
        head_timeout_s=limits.head_timeout_s,
        access_log=None,  # one line per request is written by `generation`
        auto_decompress=False,
        lingering_time=limits.linger_s,
    )
    try:
        server = await asyncio.get_running_loop().create_server(connections, host, port, backlog=BACKLOG)
    except OSError as error:
        await runner.cleanup()
        raise StartupError(
            f"The worker cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}. Choose another port, or 0."
        ) from None
    return Server(runner=runner, server=server, host=host, port=server.sockets[0].getsockname()[1])


def _publishing(events: EventPublisher) -> Callable[[web.Application], AsyncIterator[None]]:
    async def context(app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(events.run(), name="kv-events")
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    return context


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
