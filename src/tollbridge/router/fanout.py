"""A list of prompts, taken apart: one request per prompt, each with its own decision and transfer, answered as one.

A transfer carries the KV of one prompt, so a list that a policy would split becomes as many flows as it has prompts. A
`Part` is what a flow has for its client: it hands on the events of its prompt with the choices renumbered, or keeps
its answer until all are there. Prompt i of a request for n choices has the choices [i * n, (i + 1) * n), as in vLLM's
own answer to a list; usage is the sum. Whoever fails first fails the list, and the others are cancelled.

A prompt counts as a request: it waits for a place like one, has a trace of its own, and `/decisions/{id}-{i}` has its
record. The list itself holds no place, so lists cannot keep each other waiting. Its header is that of the prompt which
was the first to answer, and says how many there are.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from aiohttp import web

from tollbridge.errors import RequestError, TollbridgeError
from tollbridge.router.answers import error_answer
from tollbridge.router.client import DECISION_HEADER, Client
from tollbridge.router.context import Context
from tollbridge.router.decide import decide_call, num_choices
from tollbridge.router.flow import Flow
from tollbridge.router.ingress import Call
from tollbridge.router.merge import Chunks, merge_whole
from tollbridge.router.outcome import Arrival
from tollbridge.router.upstream import ClientGoneError
from tollbridge.wire import sse

REASON = "prompt_list"  # of the decision that asks for this


class PartFailedError(Exception):
    """One prompt of the list ended without an answer; `answer` is what the client gets for all of them."""

    def __init__(self, answer: web.Response) -> None:
        super().__init__(answer.status)
        self.answer = answer


class Fanout:
    """Drives one list of prompts. Use once: `await fanout.run()`."""

    def __init__(self, context: Context, call: Call, client: Client, arrival: Arrival) -> None:
        self._context = context
        self._call = call
        self._arrival = arrival
        self._prompts = msgspec.json.decode(call.body["prompt"], type=list[msgspec.Raw])
        if len(self._prompts) > context.limits.max_prompts:
            raise RequestError(
                f"The request has {len(self._prompts)} prompts, the router takes {context.limits.max_prompts} at once: "
                "send the rest in another request.",
                param="prompt",
            )
        # No more than there are places: otherwise a list could fill a short queue by itself, and be refused for it.
        self._gate = asyncio.Semaphore(min(context.limits.max_prompts_at_once, context.config.router.max_concurrent))
        self._list = _List(client, len(self._prompts))

    async def run(self) -> web.StreamResponse:
        """Return the answer. It has been sent already unless it is an error from before the first byte."""
        self._arrival.trace.end(prompts=len(self._prompts))
        step = num_choices(self._call)
        parts = [Part(self._list, index * step) for index in range(len(self._prompts))]
        failed: PartFailedError | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for index, part in enumerate(parts):
                    group.create_task(self._run(index, part))
        except* PartFailedError as failures:
            failed = next(error for error in failures.exceptions if isinstance(error, PartFailedError))
        try:
            return await (self._list.end(parts) if failed is None else self._list.fail(failed.answer))
        except ClientGoneError:
            self._list.client.drop()
            return self._list.client.response or web.Response(status=499)  # nobody reads it

    async def _run(self, index: int, part: Part) -> None:
        """Run one prompt to its end; PartFailedError when that is no answer."""
        async with self._gate:
            try:
                with self._context.name(f"{self._call.id[:119]}-{index}") as request_id:
                    call = self._part_call(index, request_id)
                    async with self._context.place(call, self._arrival.tenant, self._arrival.at_s) as queue_s:
                        flow = await self._flow(call, part, queue_s)
                        answer = await flow.run()
            except TollbridgeError as error:  # no place, nobody ready
                raise PartFailedError(error_answer(error)) from error
        part.check(answer)

    def _part_call(self, index: int, request_id: str) -> Call:
        prompt = self._prompts[index]
        body = {**self._call.body, "prompt": prompt}
        return dataclasses.replace(self._call, id=request_id, body=body, body_bytes=len(bytes(prompt)))

    async def _flow(self, call: Call, part: Part, queue_s: float) -> Flow:
        decision = await decide_call(self._context, call)
        trace = self._context.tracer.begin(call.trace)
        arrival = dataclasses.replace(self._arrival, queue_s=queue_s, trace=trace)  # the deadline is the list's
        return Flow(self._context, call, part, decision, arrival)


class Part(Client):
    """The client of one prompt's flow."""

    def __init__(self, whole: _List, first_choice: int) -> None:
        self._list = whole
        self._events = sse.Parser()
        self.first_choice = first_choice
        self.response: web.StreamResponse | None = None
        self.answer: _Whole | None = None
        self.failure: bytes | None = None  # the document of an error event

    @property
    def gone(self) -> bool:
        return self._list.client.gone

    def drop(self) -> None:
        self._list.client.drop()

    @property
    def is_full(self) -> bool:
        return self._list.client.is_full

    def call_when_free(self, call: Callable[[], None]) -> None:
        self._list.client.call_when_free(call)

    async def begin_stream(self, decision_header: str, first: bytes) -> None:
        self.response = await self._list.begin(decision_header)
        self.write(first)

    def write(self, data: bytes) -> None:
        """Hand on the events in `data`; an error event is kept, since it ends the list."""
        merged = b"".join(self._take(event) for event in self._events.feed(data))
        if merged:
            self._list.client.write(merged)

    async def end_stream(self, last: bytes = b"") -> web.StreamResponse:
        self.write(last)
        assert self.response is not None
        return self.response

    async def send_whole(self, status: int, content_type: str, body: bytes, decision_header: str) -> web.StreamResponse:
        self.answer = _Whole(status, content_type, body, self._list.header(decision_header))
        self.response = web.Response(status=status)
        return self.response

    def check(self, answer: web.StreamResponse) -> None:
        """Raise PartFailedError unless the flow, which returned `answer`, has answered its prompt."""
        if self.failure is not None:
            raise PartFailedError(web.Response(status=500, body=self.failure, content_type="application/json"))
        if self.answer is not None and self.answer.status != 200:
            raise PartFailedError(self.answer.response())
        if self.response is None:
            assert isinstance(answer, web.Response)
            raise PartFailedError(answer)

    def _take(self, event: bytes) -> bytes:
        if event.startswith(b'{"error"'):
            self.failure = event
        if self.failure is not None or event == b"[DONE]":
            return b""
        return self._list.chunks.take(event, self.first_choice)


@dataclass(frozen=True)
class _Whole:
    """An answer that is not streamed."""

    status: int
    content_type: str
    body: bytes
    header: str

    def response(self) -> web.Response:
        headers = {"Content-Type": self.content_type, DECISION_HEADER: self.header}
        return web.Response(status=self.status, body=self.body, headers=headers)


class _List:
    """What the parts share: the client, and the one answer that they make."""

    def __init__(self, client: Client, num_prompts: int) -> None:
        self.client = client
        self.chunks = Chunks()
        self._num_prompts = num_prompts
        self._header = ""
        self._beginning = asyncio.Lock()

    def header(self, header: str) -> str:
        """Keep the header of the prompt that is the first to answer: it stands for the list."""
        if not self._header:
            self._header = json.dumps({**json.loads(header), "prompts": self._num_prompts}, separators=(",", ":"))
        return self._header

    async def begin(self, header: str) -> web.StreamResponse:
        """Send the head of the stream unless another prompt has; return the response of all."""
        async with self._beginning:
            if self.client.response is None:
                await self.client.begin_stream(self.header(header), b"")
        assert self.client.response is not None
        return self.client.response

    async def end(self, parts: list[Part]) -> web.StreamResponse:
        """Complete the answer of parts that all have answered."""
        if self.client.response is not None:
            return await self.client.end_stream(self.chunks.last())
        body = merge_whole([(part.first_choice, part.answer.body) for part in parts if part.answer is not None])
        return await self.client.send_whole(200, "application/json", body, self._header)

    async def fail(self, answer: web.Response) -> web.StreamResponse:
        """Tell the client: by the status when it has nothing yet, else by an error event and an end without [DONE]."""
        if self.client.response is None:
            return answer
        if not isinstance(answer.body, bytes):  # of a client that left just as the stream began
            return self.client.response
        return await self.client.end_stream(sse.event(answer.body))
