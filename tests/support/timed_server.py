"""An OpenAI-compatible server whose speed is known: it computes nothing and takes exactly the time it was told to.

One engine: prompts are computed one after another, chunk by chunk; between chunks all running streams make a step
together. It keeps a prefix cache in blocks and counts what vLLM counts, where it is told to have metrics. Its clock is
the event loop's, and each pass ends at its due time, so lateness does not add up.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

BLOCK = 16


@dataclass(kw_only=True)
class Speed:
    alpha_s: float = 0.004
    beta_s: float = 60e-6
    gamma_s: float = 8e-9
    step_s: float = 0.02
    per_decode_s: float = 0.0005
    fixed_s: float = 0.0  # before a request reaches the engine
    budget: int = 2048

    def chunk_s(self, tokens: int, context: int) -> float:
        """Return the time of a pass over a chunk: never less than that of the weights."""
        return max(self.step_s, self.alpha_s + tokens * (self.beta_s + self.gamma_s * (context + tokens / 2)))


@dataclass
class _Request:
    prompt: list[int]
    max_tokens: int
    cached: int
    done: int = 0  # prompt tokens computed or cached
    prefill_s: float = 0.0
    tokens: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    sent: int = 0


class TimedServer:
    """Attributes may be changed between requests."""

    def __init__(self, speed: Speed, *, metrics: bool = True) -> None:
        self.speed = speed
        self.metrics = metrics
        self.model, self.max_model_len, self.vocabulary = "timed", 8192, 30_000
        self.api_key: str | None = None
        self.streams = True
        self.lie = b""  # an event sent instead of every token
        self.details: dict[str, int] | None = None  # of the prompt's tokens, in every usage
        self.collects = False  # a proxy on the way sends nothing before it has all
        self.foreign_open, self.foreign_each = 0, 0  # requests of others: open now; ended with each of ours
        self.ended = self.prefills = self.hits = 0
        self.prefill_s = 0.0
        self.prompts: list[list[int]] = []
        self.url = ""
        self._blocks: set[int] = set()
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._work = asyncio.Event()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[TimedServer]:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._completions)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        engine = asyncio.create_task(self._engine())
        try:
            yield self
        finally:
            engine.cancel()
            await runner.cleanup()

    # ── the engine ──

    async def _engine(self) -> None:
        now = asyncio.get_running_loop().time
        free_s = now()
        while True:
            if not self._waiting and not self._running:
                self._work.clear()
                await self._work.wait()
                free_s = now()
            took_s = self._plan_s()
            free_s += took_s
            await asyncio.sleep(max(0.0, free_s - now()))
            self._finish(took_s)

    def _plan_s(self) -> float:
        steps_s = self.speed.step_s + self.speed.per_decode_s * len(self._running)
        if not self._waiting:
            return steps_s
        request = self._waiting[0]
        chunk = min(self.speed.budget, len(request.prompt) - request.done)
        return self.speed.chunk_s(chunk, request.done) + self.speed.per_decode_s * len(self._running)

    def _finish(self, took_s: float) -> None:
        running = list(self._running)
        if self._waiting:
            request = self._waiting[0]
            request.done += min(self.speed.budget, len(request.prompt) - request.done)
            request.prefill_s += took_s
            if request.done == len(request.prompt):
                self._running.append(self._waiting.popleft())
                running.append(request)
        for request in running:
            request.sent += 1
            request.tokens.put_nowait(request.sent)
            if request.sent == request.max_tokens:
                self._running.remove(request)
                self._count(request)

    def _count(self, request: _Request) -> None:
        self.ended += 1 + self.foreign_each
        self.prefills += 1 + self.foreign_each
        self.prefill_s += request.prefill_s
        self.hits += request.cached

    def _cached(self, prompt: list[int]) -> int:
        """Return how many tokens are cached, never all of them, and cache the prompt's full blocks."""
        ends = range(BLOCK, len(prompt) + 1, BLOCK)
        hashes = [hash(tuple(prompt[:end])) for end in ends]
        known = next((i for i, h in enumerate(hashes) if h not in self._blocks), len(hashes))
        self._blocks.update(hashes)
        return min(known, (len(prompt) - 1) // BLOCK) * BLOCK

    # ── the door ──

    async def _models(self, http: web.Request) -> web.Response:
        self._check_key(http)
        return web.json_response({"data": [{"id": self.model, "max_model_len": self.max_model_len}]})

    async def _metrics(self, http: web.Request) -> web.Response:
        if not self.metrics:
            raise web.HTTPNotFound
        label = '{engine="0",model_name="timed"}'
        return web.Response(
            text=f"# HELP vllm:num_requests_running Requests in the batch.\n"
            f"vllm:num_requests_running{label} {len(self._running) + self.foreign_open}\n"
            f"vllm:num_requests_waiting{label} {len(self._waiting)}\n"
            f'vllm:request_success_total{{engine="0",finished_reason="length"}} {self.ended}\n'
            f'vllm:request_success_total{{engine="0",finished_reason="stop"}} 0\n'
            f"vllm:prefix_cache_hits_total{label} {self.hits}\n"
            f"vllm:request_prefill_time_seconds_sum{label} {self.prefill_s!r}\n"
            f"vllm:request_prefill_time_seconds_count{label} {self.prefills}\n"
        )

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        self._check_key(http)
        body = await http.json()
        prompt = body["prompt"]
        if max(prompt) >= self.vocabulary:
            return web.json_response({"error": {"message": "out of vocabulary"}}, status=400)
        self.prompts.append(prompt)
        if not self.streams:
            return web.json_response({"choices": [{"text": "x"}]})
        await asyncio.sleep(self.speed.fixed_s)
        cached = self._cached(prompt)
        request = _Request(prompt, body["max_tokens"], cached, done=cached)
        self._waiting.append(request)
        self._work.set()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(http)
        collected = b""
        for _ in range(request.max_tokens):
            collected += self._event(await request.tokens.get(), len(prompt))
            if not self.collects:
                await response.write(collected)
                collected = b""
        await response.write(collected + b"data: [DONE]\n\n")
        return response

    def _event(self, count: int, num_prompt: int) -> bytes:
        usage = {"completion_tokens": count, "prompt_tokens": num_prompt, "prompt_tokens_details": self.details}
        event = {"choices": [{"index": 0, "text": ""}], "usage": usage}
        return b"data: " + (self.lie or json.dumps(event).encode()) + b"\n\n"

    def _check_key(self, http: web.Request) -> None:
        if self.api_key is not None and http.headers.get("authorization") != f"Bearer {self.api_key}":
            raise web.HTTPUnauthorized
