"""From an HTTP request to a `Job`: body read within bounds, parsed, model, prompt, sampling and role checked."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterator
from dataclasses import replace

from aiohttp import web

from tollbridge.engine.base import Structure, Tokenizer
from tollbridge.errors import RequestError
from tollbridge.obs.tracing import trace_of
from tollbridge.wire.bodies import Bodies
from tollbridge.wire.openai import ChatCompletionRequest, CompletionRequest
from tollbridge.wire.params import TransferParams
from tollbridge.wire.responses import ResponsesRequest
from tollbridge.worker import legs
from tollbridge.worker.door import Door
from tollbridge.worker.generate import as_completion
from tollbridge.worker.job import Branch, Job, Kind
from tollbridge.worker.messages import chat_options
from tollbridge.worker.parse import parse
from tollbridge.worker.prompts import split_prompts
from tollbridge.worker.responses import as_chat, in_own_words
from tollbridge.worker.sampling import Asked, check_shape, common_params, only_echoes, params_of_prompt
from tollbridge.worker.structured import param_of
from tollbridge.worker.tools import check_tools, maybe_reader

REPORT_HEADER = "x-tollbridge-report"
REQUEST_ID_HEADER = "x-request-id"

_PREFIX: dict[Kind, str] = {
    "completion": "cmpl-",
    "chat": "chatcmpl-",
    "generate": "generate-tokens-",
    "response": "resp_",
}
_serial = itertools.count()
_SAFE_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")


async def completion_job(door: Door, http: web.Request, body: bytes) -> Job:
    """Admit `POST /v1/completions`; RequestError names what is wrong."""
    arrival_s = door.clock.monotonic()
    asked = parse(body, CompletionRequest)
    door.check_model(asked.model)
    check_shape(asked)
    return await _job(door, http, asked, await door.prompts.completion(asked), "completion", arrival_s)


async def chat_job(door: Door, http: web.Request, body: bytes) -> Job:
    """Admit `POST /v1/chat/completions`."""
    arrival_s = door.clock.monotonic()
    asked = parse(body, ChatCompletionRequest)
    door.check_model(asked.model)
    check_shape(asked)
    check_tools(asked)
    prompt_token_ids = await door.prompts.messages(asked.messages, chat_options(asked))
    return await _job(door, http, asked, [prompt_token_ids], "chat", arrival_s)


async def generate_job(door: Door, http: web.Request, body: bytes) -> Job:
    """Admit `POST /inference/v1/generate`: a completion of token ids under other names."""
    arrival_s = door.clock.monotonic()
    asked = as_completion(body, door.engine.info.max_model_len)
    door.check_model(asked.model)
    check_shape(asked)
    (prompt,) = split_prompts(asked.prompt)
    assert isinstance(prompt, list)
    door.prompts.check_ids(prompt, "token_ids")
    return await _job(door, http, asked, [prompt], "generate", arrival_s)


async def response_job(door: Door, http: web.Request, body: bytes) -> Job:
    """Admit `POST /v1/responses`: a chat under other names."""
    arrival_s = door.clock.monotonic()
    response = parse(body, ResponsesRequest)
    door.check_model(response.model)
    with in_own_words():
        asked = as_chat(response)
        check_shape(asked)
        prompt_token_ids = await door.prompts.messages(asked.messages, chat_options(asked))
        job = await _job(door, http, asked, [prompt_token_ids], "response", arrival_s)
    return replace(job, response=response)


async def read_body(http: web.Request, bodies: Bodies) -> bytes:
    """Return the whole body; RequestError when it is compressed, else what `Bodies.read` raises."""
    if http.headers.get("Content-Encoding", "identity") != "identity":
        raise RequestError("Compressed request bodies are not supported: send the JSON as it is.")
    return await bodies.read(http)


def request_id(http: web.Request) -> str:
    """Return the caller's x-request-id when it is harmless in headers and logs, a random one otherwise."""
    given = http.headers.get(REQUEST_ID_HEADER, "")
    return given if _SAFE_ID.fullmatch(given) else secrets.token_hex(16)


async def _job(
    door: Door,
    http: web.Request,
    asked: Asked,
    prompts: list[list[int]],
    kind: Kind,
    arrival_s: float,
) -> Job:
    name = request_id(http)
    public_id = f"{_PREFIX[kind]}{name}"
    transfer = legs.transfer_params(asked.kv_transfer_params, secret=door.secret, now_s=door.clock.wall())
    branches = tuple(_branches(door, asked, prompts, transfer, public_id))
    legs.check_leg(transfer, branches)
    await _check_structure(door, asked, branches[0].sampling.structure)
    options = asked.stream_options
    return Job(
        request_id=name,
        id=public_id,
        kind=kind,
        model=door.identity.model_names[0],
        branches=branches,
        cache_salt=asked.cache_salt,
        priority=asked.priority,
        num_continued_tokens=asked.continued_tokens,
        stream=asked.stream,
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None and options.continuous_usage_stats,
        return_token_ids=asked.return_token_ids,
        tokens_as_ids=asked.return_tokens_as_token_ids,
        only_echoes=only_echoes(asked),
        wants_report=transfer is not None or http.headers.get(REPORT_HEADER) == "1",
        created=int(door.clock.wall()),
        arrival_s=arrival_s,
        trace=trace_of(http.headers),
    )


def _branches(
    door: Door, asked: Asked, prompts: list[list[int]], transfer: TransferParams | None, public_id: str
) -> Iterator[Branch]:
    model, tokenizer = door.engine.info, door.engine.tokenizer
    common = common_params(asked, model, tokenizer)
    for number, prompt in enumerate(prompts):
        echo = _echo(asked, tokenizer, number, prompt)
        choices = params_of_prompt(common, asked, model, num_prompt_tokens=len(prompt))
        for choice, sampling in enumerate(choices):
            yield Branch(
                index=number * asked.n + choice,
                engine_id=f"{public_id}-{next(_serial)}",
                prompt_token_ids=prompt,
                sampling=sampling,
                transfer=transfer if choice == 0 else None,
                leader=number * asked.n if choice else None,
                echo=echo,
                tools=maybe_reader(asked) if isinstance(asked, ChatCompletionRequest) else None,
            )


def _echo(asked: Asked, tokenizer: Tokenizer, number: int, prompt: list[int]) -> str | None:
    """Return the text that a prompt's choices begin with: as it was sent; none beside token ids, as in vLLM."""
    if not (isinstance(asked, CompletionRequest) and asked.echo):
        return None
    if asked.return_token_ids:
        return ""
    sent = split_prompts(asked.prompt)[number]
    return sent if isinstance(sent, str) else tokenizer.decode(prompt)


async def _check_structure(door: Door, asked: Asked, structure: Structure | None) -> None:
    """Compile a structure beside the event loop; its error names the parameter that it came from."""
    if structure is None:
        return
    try:
        await door.prompts.beside(lambda: door.engine.check_structure(structure))
    except RequestError as error:
        raise type(error)(error.message, param=param_of(structure, asked.response_format)) from None
