"""From an HTTP request to a `Job`: body read within bounds, parsed, model, prompt, sampling and role checked."""

from __future__ import annotations

import itertools
import re
import secrets
from typing import Literal

from aiohttp import web

from tollbridge.errors import RequestError
from tollbridge.wire.bodies import Bodies
from tollbridge.wire.openai import ChatCompletionRequest, CompletionRequest
from tollbridge.worker import legs
from tollbridge.worker.door import Door
from tollbridge.worker.job import Job
from tollbridge.worker.messages import chat_options
from tollbridge.worker.parse import parse
from tollbridge.worker.sampling import Asked, check_single, sampling_params
from tollbridge.worker.tools import check_tools, maybe_reader

REPORT_HEADER = "x-tollbridge-report"
REQUEST_ID_HEADER = "x-request-id"

_serial = itertools.count()
_SAFE_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")


async def completion_job(door: Door, http: web.Request, body: bytes) -> Job:
    """Admit `POST /v1/completions`; RequestError names what is wrong."""
    arrival_s = door.clock.monotonic()
    asked = parse(body, CompletionRequest)
    door.check_model(asked.model)
    check_single(asked)
    return _job(door, http, asked, await door.prompts.completion(asked), "completion", arrival_s)


async def chat_job(door: Door, http: web.Request, body: bytes) -> Job:
    """Admit `POST /v1/chat/completions`."""
    arrival_s = door.clock.monotonic()
    asked = parse(body, ChatCompletionRequest)
    door.check_model(asked.model)
    check_single(asked)
    check_tools(asked)
    prompt_token_ids = await door.prompts.messages(asked.messages, chat_options(asked))
    return _job(door, http, asked, prompt_token_ids, "chat", arrival_s)


async def read_body(http: web.Request, bodies: Bodies) -> bytes:
    """Return the whole body; RequestError when it is compressed, else what `Bodies.read` raises."""
    if http.headers.get("Content-Encoding", "identity") != "identity":
        raise RequestError("Compressed request bodies are not supported: send the JSON as it is.")
    return await bodies.read(http)


def request_id(http: web.Request) -> str:
    """Return the caller's x-request-id when it is harmless in headers and logs, a random one otherwise."""
    given = http.headers.get(REQUEST_ID_HEADER, "")
    return given if _SAFE_ID.fullmatch(given) else secrets.token_hex(16)


def _job(
    door: Door,
    http: web.Request,
    asked: Asked,
    prompt_token_ids: list[int],
    kind: Literal["completion", "chat"],
    arrival_s: float,
) -> Job:
    sampling = sampling_params(asked, door.engine.info, num_prompt_tokens=len(prompt_token_ids))
    transfer = legs.transfer_params(asked.kv_transfer_params, secret=door.secret, now_s=door.clock.wall())
    legs.check_leg(transfer, sampling)
    options = asked.stream_options
    name = request_id(http)
    public_id = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{name}"
    return Job(
        request_id=name,
        id=public_id,
        engine_id=f"{public_id}-{next(_serial)}",
        kind=kind,
        model=door.identity.model_names[0],
        prompt_token_ids=prompt_token_ids,
        sampling=sampling,
        transfer=transfer,
        cache_salt=asked.cache_salt,
        stream=asked.stream,
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None and options.continuous_usage_stats,
        return_token_ids=asked.return_token_ids,
        tools=maybe_reader(asked) if isinstance(asked, ChatCompletionRequest) else None,
        wants_report=transfer is not None or http.headers.get(REPORT_HEADER) == "1",
        created=int(door.clock.wall()),
        arrival_s=arrival_s,
    )
