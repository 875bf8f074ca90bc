"""A stand-in for a worker: speaks its HTTP API, reports like one, and misbehaves on request. No engine, no KV.

What it does with a request is a `Behaviour`, chosen by the request's role (`prefill`, `decode`, `local`):

    serve      tokens one by one, then the report
    hang       nothing at all, not even a head, until the client leaves
    head       the head of a stream, then nothing
    stall      `after` tokens, then nothing
    die        `after` tokens, then the connection is torn down (0: before the head)
    end_early  `after` tokens, then a clean end without [DONE]
    error      an HTTP error `status`
    event      the head, then an error event
    break_event  `after` tokens, then an error event
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from aiohttp import web

from tollbridge.config.cluster import WorkerConfig
from tollbridge.wire import params as wire
from tollbridge.wire.params import TransferReport, WorkerReport

SECRET = b"a secret for tests only"
KAPPA = 64  # pretended KV bytes per token
PROMPT_IDS = [7, 8, 9]  # of every prompt
FIRST_ID = 100  # of the stub's own tokens

Connector = Literal["tollbridge", "nixl", "nixl-push"]
Mode = Literal["serve", "hang", "head", "stall", "die", "end_early", "error", "event", "break_event"]


@dataclass(frozen=True)
class Behaviour:
    mode: Mode = "serve"
    after: int = 0
    status: int = 500
    error: dict[str, Any] = field(default_factory=lambda: {"message": "the stub says no", "type": "stub"})
    hold: asyncio.Event | None = None  # answer only once it is set


@dataclass(frozen=True)
class Seen:
    """One request as the stub got it."""

    path: str
    role: str
    headers: dict[str, str]
    body: dict[str, Any]


class StubWorker:
    """One stub. Tests change its attributes between requests."""

    def __init__(self, name: str, prefer: Literal["prefill", "decode", "any"] = "any") -> None:
        self.name, self.prefer = name, prefer
        self.url = ""
        self.model = "stub-model"
        self.healthy = True
        self.engine_kind: Literal["embedded", "vllm"] = "embedded"  # what the cluster file says
        self.connector: Connector = "tollbridge"  # the same
        self.usage_details: dict[str, int] | None = None  # of a vLLM
        self.engine: dict[str, int] = {}  # statistics in the status
        self.stock = False  # a server without /tollbridge/status and reports, like vLLM
        self.metrics: str | None = None  # of a vLLM
        self.num_asked_for_metrics = 0
        self.event_sources: dict[str, Any] | None = None
        self.kv: str | None = f"127.0.0.1:{7000 + sum(name.encode())}"
        self.incarnation = "first"
        self.draining = False
        self.odd_models: bytes | None = None  # a strange answer of /v1/models
        self.slow_health = False  # /health hangs
        self.num_slow = 0
        self.tokens = ["Hel", "lo", " wor", "ld"]
        self.offers_ids = True  # has /inference/v1/generate
        self.names_ids = True  # answers `return_token_ids`
        self.detokenizes = True  # has /detokenize
        self.parrot = False  # generate the prompt's own characters instead of `tokens`
        self.refuses: object = None  # a prompt that is the client's mistake
        self.longest = 1 << 20  # tokens; what has more is refused too
        self.prompt_tokens = 100
        self.cached_tokens = 0
        self.behaviour: dict[str, Behaviour] = {}
        self.report: dict[str, dict[str, Any]] = {}  # role -> fields of the report that differ
        self.cut: Callable[[bytes], list[bytes]] | None = None  # how a stream is cut into TCP writes
        self.seen: list[Seen] = []
        self.num_written = 0  # pieces of streams
        self.num_asked = 0  # times that the router asked for tokens
        self.tokenize: Callable[[dict[str, Any]], tuple[dict[str, Any], int]] | None = None  # body -> answer, status
        self.released: asyncio.Queue[str] = asyncio.Queue()  # transfer ids
        self.arrived: dict[str, asyncio.Event] = {role: asyncio.Event() for role in ("prefill", "decode", "local")}
        self.departed: dict[str, asyncio.Event] = {role: asyncio.Event() for role in ("prefill", "decode", "local")}
        self._runner: web.AppRunner | None = None
        self._port = 0

    # --- life

    async def start(self) -> None:
        """Listen; the second time on the same port."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_post("/v1/responses", self._generate)
        if self.offers_ids:
            app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/tokenize", self._tokenize)
        if self.detokenizes:
            app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post(wire.RELEASE_PATH, self._release)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/tollbridge/status", self._status)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/kv_event_sources", self._event_sources)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """Close the port and every connection: from now on connects are refused."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def num_connections(self) -> int:
        """Return how many clients are connected, idle ones included."""
        server = self._runner.server if self._runner is not None else None
        return len(server.connections) if server is not None else 0

    @property
    def config(self) -> WorkerConfig:
        kv = self.kv if self.engine_kind == "vllm" and self.kv else "127.0.0.1:0"
        return WorkerConfig(
            name=self.name,
            prefer=self.prefer,
            url=self.url,
            engine=self.engine_kind,
            connector=self.connector,
            kv=kv,
        )

    def roles(self) -> list[str]:
        return [seen.role for seen in self.seen]

    # --- handlers

    async def _health(self, _: web.Request) -> web.Response:
        if self.slow_health:
            self.num_slow += 1
            await asyncio.Event().wait()
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, _: web.Request) -> web.Response:
        if self.odd_models is not None:
            return web.Response(body=self.odd_models)
        return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model", "created": 1}]})

    async def _status(self, _: web.Request) -> web.Response:
        if self.stock:
            raise web.HTTPNotFound
        status = {"name": self.name, "kv": self.kv, "incarnation": self.incarnation, "draining": self.draining}
        status["engine"] = self.engine
        return web.json_response(status)

    async def _metrics(self, _: web.Request) -> web.Response:
        self.num_asked_for_metrics += 1
        if self.metrics is None:
            raise web.HTTPNotFound
        return web.Response(text=self.metrics)

    async def _event_sources(self, _: web.Request) -> web.Response:
        if self.event_sources is None:
            raise web.HTTPNotFound
        return web.json_response(self.event_sources)

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "x-request-id" in request.headers:  # a client's; what the router asks on its own account has none
            self.seen.append(Seen(request.path, "local", dict(request.headers), body))
        else:
            self.num_asked += 1
        if self.tokenize is not None:
            answer, status = self.tokenize(body)
            return web.json_response(answer, status=status)
        return web.json_response({"tokens": [1, 2, 3], "count": 3})

    async def _detokenize(self, request: web.Request) -> web.Response:
        ids = (await request.json()).get("tokens", [])
        return web.json_response({"prompt": "".join(self.tokens[i - FIRST_ID] for i in ids if i >= FIRST_ID)})

    async def _release(self, request: web.Request) -> web.Response:
        params = wire.parse((await request.json())["kv_transfer_params"])
        assert params is not None and params.role == "prefill"
        wire.verify(params, SECRET, now_s=0.0)
        self.released.put_nowait(params.transfer_id)
        return web.Response(status=204)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        role, transfer_id = self._role(body)
        self.seen.append(Seen(request.path, role, {k.lower(): v for k, v in request.headers.items()}, body))
        if role == "release":
            self.released.put_nowait(transfer_id)
            return web.json_response(self._whole(body, None))
        self.arrived[role].set()
        try:
            return await self._behave(request, body, role, transfer_id)
        except (asyncio.CancelledError, ConnectionError):
            self.departed[role].set()
            raise

    def _role(self, body: dict[str, Any]) -> tuple[str, str]:
        params = wire.parse(body.get("kv_transfer_params"))
        if params is None:
            return "local", ""
        wire.verify(params, SECRET, now_s=0.0)
        return params.role, params.transfer_id

    async def _behave(self, request: web.Request, body: dict[str, Any], role: str, transfer_id: str) -> Any:
        behaviour = self.behaviour.get(role, Behaviour())
        if behaviour.hold is not None:
            await behaviour.hold.wait()
        if behaviour.mode == "hang":
            await asyncio.Event().wait()
        prompt = body.get("prompt")
        is_long = isinstance(prompt, list) and len(prompt) > self.longest
        if is_long or (self.refuses is not None and prompt == self.refuses):
            return web.json_response({"error": {"message": "this prompt is odd", "param": "prompt"}}, status=400)
        if behaviour.mode == "error":
            return web.json_response({"error": behaviour.error}, status=behaviour.status)
        if behaviour.mode == "die" and not behaviour.after:
            return self._tear(request)
        report = None if self.stock else self.make_report(role, transfer_id, said=_said(body))
        if not body.get("stream"):
            return web.json_response(self._whole(body, report))
        return await self._stream(request, body, behaviour, report)

    async def _stream(
        self, request: web.Request, body: dict[str, Any], behaviour: Behaviour, report: WorkerReport | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if behaviour.mode == "head":
            await asyncio.Event().wait()
        if behaviour.mode == "event":
            await response.write(_event({"error": behaviour.error}))
            await response.write_eof()
            return response
        events = [_event(chunk) for chunk in self._chunks(body, report)] + [b"data: [DONE]\n\n"]
        if behaviour.mode in ("stall", "die", "end_early", "break_event"):
            events = events[: behaviour.after]
        if behaviour.mode == "break_event":
            events.append(_event({"error": behaviour.error}))
        for piece in self.cut(b"".join(events)) if self.cut else events:
            await response.write(piece)
            self.num_written += 1
        if behaviour.mode == "stall":
            await asyncio.Event().wait()
        if behaviour.mode == "die":
            await asyncio.sleep(0)
            return self._tear(request, response)
        await response.write_eof()
        return response

    @staticmethod
    def _tear(request: web.Request, response: web.StreamResponse | None = None) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()  # flushes what was written, then the connection ends in the middle of the answer
        return response or web.Response()

    # --- bodies

    def make_report(self, role: str, transfer_id: str = "", said: int = 0) -> WorkerReport:
        lacked = max(self.prompt_tokens - 1 - self.cached_tokens, 0) if role == "decode" else 0
        size = lacked * KAPPA
        transfer = TransferReport(
            transfer_id=transfer_id, side="receive" if role == "decode" else "send", outcome="done",
            num_tokens=lacked, payload_bytes=size, wire_bytes=size + 100, num_frames=4, wire_s=0.5,
        )  # fmt: skip
        fields: dict[str, Any] = {
            "role": role,
            "prompt_tokens": self.prompt_tokens,
            "computed_tokens": self.prompt_tokens - self.cached_tokens - lacked,
            "cached_tokens": self.cached_tokens,
            "loaded_tokens": lacked,
            "generated_tokens": 1 if role == "prefill" else len(self.tokens) - said,
            "transfer": None if role == "local" else transfer,
        }
        return WorkerReport(**(fields | self.report.get(role, {})))

    def _whole(self, body: dict[str, Any], report: WorkerReport | None) -> dict[str, Any]:
        text = "".join(self._tokens(body))
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        choice |= {"message": {"role": "assistant", "content": text}} if "messages" in body else {"text": text}
        whole = {"id": "x", "created": 1, "model": self.model, "choices": [choice], "usage": self._usage()}
        return whole | {"object": "chat.completion" if "messages" in body else "text_completion"} | _carry(report)

    def _chunks(self, body: dict[str, Any], report: WorkerReport | None) -> list[dict[str, Any]]:
        chat = "messages" in body
        common = {"id": "x", "created": 1, "model": self.model}
        common["object"] = "chat.completion.chunk" if chat else "text_completion"
        chunks = []
        said, tokens = _said(body), self._tokens(body)
        for at, token in list(enumerate(tokens))[said:]:
            last = at == len(tokens) - 1
            choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if last else None}
            choice |= {"delta": {"content": token}} if chat else {"text": token}
            ids: dict[str, Any] = {}
            if body.get("return_token_ids") and self.names_ids:
                choice["token_ids"] = [FIRST_ID + at]
                ids = {"prompt_token_ids": PROMPT_IDS} if at == said else {}
                choice |= {} if chat else ids
            chunks.append(common | {"choices": [choice]} | (ids if chat else {}) | (_carry(report) if last else {}))
        if (body.get("stream_options") or {}).get("include_usage"):
            chunks.append(common | {"choices": [], "usage": self._usage(said)})
        return chunks

    def _tokens(self, body: dict[str, Any]) -> list[str]:
        return list(body["prompt"]) if self.parrot else self.tokens

    def _usage(self, said: int = 0) -> dict[str, Any]:
        out = len(self.tokens) - said
        usage: dict[str, Any] = {"prompt_tokens": self.prompt_tokens + said, "completion_tokens": out}
        usage["total_tokens"] = self.prompt_tokens + len(self.tokens)
        return usage | ({"prompt_tokens_details": self.usage_details} if self.usage_details else {})


@asynccontextmanager
async def stubs(*workers: StubWorker) -> AsyncIterator[None]:
    """Run `workers` while the context lasts."""
    try:
        for worker in workers:
            await worker.start()
        yield
    finally:
        for worker in workers:
            await worker.stop()


def _said(body: dict[str, Any]) -> int:
    """Return how many tokens of the answer a continuation has in its prompt."""
    prompt = body.get("prompt")
    return sum(isinstance(i, int) and i >= FIRST_ID for i in prompt) if isinstance(prompt, list) else 0


def _carry(report: WorkerReport | None) -> dict[str, Any]:
    return {"kv_transfer_params": {"tollbridge": msgspec.to_builtins(report)}} if report else {}


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"
