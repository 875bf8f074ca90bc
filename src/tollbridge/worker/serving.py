"""Run a job and write its answer: one body, or a stream of server-sent events.

A stream's headers leave with its first output: an engine that fails before that is still an honest status code, and the
router can send the request elsewhere. After that a failure is an `error` event, and the stream ends.
"""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web

from tollbridge.engine.base import StepOutput
from tollbridge.errors import TollbridgeError
from tollbridge.worker.answers import Answer, Choice, answer_for
from tollbridge.worker.door import Door
from tollbridge.worker.faults import unforeseen
from tollbridge.worker.generation import BranchOutput, Generation, running
from tollbridge.worker.job import Branch, Job
from tollbridge.worker.responses import ResponseAnswer

log = logging.getLogger("tollbridge.worker")

STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


async def serve(door: Door, http: web.Request, job: Job) -> web.StreamResponse:
    """Answer `job`. A client that leaves cancels this task, and with it the request in the engine."""
    headers = {"x-request-id": job.request_id}
    with running(door, job) as generation:
        if not job.stream:
            body = await _whole(door, generation)
            return web.Response(body=body, content_type="application/json", headers=headers)
        first = await generation.next()
        response = web.StreamResponse(headers=STREAM_HEADERS | headers)
        await response.prepare(http)
        await _Stream(http, response, generation, door).run(first)
        return response


async def _whole(door: Door, generation: Generation) -> bytes:
    choices = [Choice(branch=branch) for branch in generation.job.branches]
    while not generation.finished:
        for branch, output in await generation.next():
            choices[branch.index].take(output)
    answer = _answer(door, generation.job)
    if any(choice.prompt_logprobs for choice in choices):  # thousands of tokens to be spelled
        return await door.prompts.beside(lambda: answer.whole(choices))
    return answer.whole(choices)


def _answer(door: Door, job: Job) -> Answer:
    return ResponseAnswer(job, job.response) if job.response is not None else answer_for(job, door.engine.tokenizer)


class _Stream:
    """The events of one answer."""

    def __init__(self, http: web.Request, response: web.StreamResponse, generation: Generation, door: Door) -> None:
        self._http = http
        self._response = response
        self._generation = generation
        self._door = door
        self._write_timeout_s = door.limits.write_timeout_s
        self._answer = _answer(door, generation.job)
        self._choices = [Choice(branch=branch) for branch in generation.job.branches]

    async def run(self, outputs: list[BranchOutput]) -> None:
        """Write `outputs` and all that follow. Once the client has gone there is nobody left to tell of a failure."""
        try:
            await self._relay(outputs)
        except ConnectionResetError:
            pass
        except TimeoutError:
            self._generation.error = "The client did not read its stream in time."
            if self._http.transport is not None:
                self._http.transport.abort()  # closing would wait for the same client

    async def _relay(self, outputs: list[BranchOutput]) -> None:
        try:
            await self._write_outputs(outputs)
            while not self._generation.finished:
                await self._write_outputs(await self._generation.next())
        except (ConnectionResetError, TimeoutError):
            raise
        except TollbridgeError as error:
            await self._fail(error)
        except Exception:
            # The headers have left, so the middleware could not answer any more: this is the boundary.
            log.exception("unforeseen exception: path=%s", self._http.path)
            await self._fail(unforeseen())

    async def _write_outputs(self, outputs: list[BranchOutput]) -> None:
        """Write one event per output, and what ends the stream after the last one, in one go."""
        if any(output.prompt_logprobs for _, output in outputs):  # thousands of tokens to be spelled
            events = await self._door.prompts.beside(lambda: self._events(outputs))
        else:
            events = self._events(outputs)
        if self._generation.finished:
            events.append(self._answer.end(self._choices))
        await self._write(b"".join(events))

    def _events(self, outputs: list[BranchOutput]) -> list[bytes]:
        return [self._event(branch, output) for branch, output in outputs]

    def _event(self, branch: Branch, output: StepOutput) -> bytes:
        choice = self._choices[branch.index]
        choice.take(output)
        return self._answer.chunk(choice, output)

    async def _fail(self, error: TollbridgeError) -> None:
        self._generation.error = error.message
        await self._write(self._answer.failure(error))

    async def _write(self, data: bytes) -> None:
        async with asyncio.timeout(self._write_timeout_s):
            await self._response.write(data)
