"""`POST /v1/responses`, OpenAI's newer interface, without state and tools.

The request is a chat under other names; the answer is one message of text, or the events by which that grows. Nothing
is stored, so each request carries its whole conversation; items of an earlier answer may be sent back as they came.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from msgspec import UNSET

from tollbridge.engine.base import StepOutput
from tollbridge.errors import RequestError, TollbridgeError, UnsupportedError
from tollbridge.wire.openai import ChatCompletionRequest, JsonSchemaFormat, ResponseFormat, error_body
from tollbridge.wire.responses import (
    IncompleteDetails,
    InputTokensDetails,
    OutputMessage,
    OutputText,
    Response,
    ResponsesRequest,
    ResponseUsage,
    Status,
    TextFormat,
)
from tollbridge.worker.answers import Choice, usage
from tollbridge.worker.job import Job
from tollbridge.worker.messages import plain_message

_OF_ITEMS = frozenset({"type", "role", "content", "id", "status", "phase"})  # the last three: of an earlier answer
_TEXTS = ("input_text", "output_text", "text")  # no set: what a client sends may have no hash
_SAME = (
    "model", "temperature", "top_p", "stream", "user", "top_k", "seed", "stop", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "skip_special_tokens", "ignore_eos", "priority", "cache_salt",
)  # fmt: skip
_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text"}
_INPUT = "input"


def as_chat(asked: ResponsesRequest) -> ChatCompletionRequest:
    """Return the chat that `asked` means; RequestError names what is wrong."""
    messages = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    if isinstance(asked.input, str):
        messages.append({"role": "user", "content": asked.input})
    else:
        messages += [_message(index, item) for index, item in enumerate(asked.input)]
        if not asked.input:
            raise RequestError('Parameter "input" must not be empty.', param=_INPUT)
    return ChatCompletionRequest(
        messages=messages,
        max_completion_tokens=asked.max_output_tokens,
        response_format=_format(asked.text.format),
        **{name: getattr(asked, name) for name in _SAME},
    )


@contextmanager
def in_own_words() -> Iterator[None]:
    """Let what is refused of the chat be told by the names of this interface."""
    try:
        yield
    except RequestError as error:
        message = error.message
        for theirs, ours in _NAMES.items():
            message = message.replace(theirs, ours)
        param = None if error.param is None else _NAMES.get(error.param, error.param)
        raise type(error)(message, param=param) from None


class ResponseAnswer:
    """Writes the answer. The events of a stream are numbered, and end with one that has all of it."""

    def __init__(self, job: Job, asked: ResponsesRequest) -> None:
        self._job = job
        self._asked = asked
        self._item_id = f"msg_{job.request_id}"
        self._num_events = 0

    def chunk(self, choice: Choice, output: StepOutput) -> bytes:
        said = b"".join(self._beginning()) if len(choice.texts) == 1 else b""
        if output.text:
            said += self._event("response.output_text.delta", **self._place(), delta=output.text, logprobs=[])
        return said

    def end(self, choices: Sequence[Choice]) -> bytes:
        whole = self._response(choices)
        (item,) = whole.output
        (part,) = item.content
        place = self._place()
        return b"".join([
            self._event("response.output_text.done", **place, text=part.text, logprobs=[]),
            self._event("response.content_part.done", **place, part=part),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{whole.status}", response=whole),
        ])  # fmt: skip

    def failure(self, error: TollbridgeError) -> bytes:
        """Return an error event in the shape of this interface, and as other streams have it: clients look for both."""
        told = error_body(error).error
        return self._event("error", code=told.type, message=told.message, param=told.param, error=told)

    def whole(self, choices: Sequence[Choice]) -> bytes:
        return msgspec.json.encode(self._response(choices))

    def _beginning(self) -> Iterator[bytes]:
        begun = self._response(())
        item = OutputMessage(id=self._item_id, content=[], status="in_progress")
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **self._place(), part=OutputText(text=""))

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: object) -> bytes:
        data = msgspec.json.encode({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def _response(self, choices: Sequence[Choice]) -> Response:
        """Return the answer; without `choices` what is known before there is any."""
        asked, status = self._asked, _status(choices)
        return Response(
            id=self._job.id,
            created_at=self._job.created,
            model=self._job.model,
            status=status,
            output=[self._item(choice, status) for choice in choices],
            usage=_usage(choices) if choices else None,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            text=asked.text,
            user=asked.user,
        )

    def _item(self, choice: Choice, status: Status) -> OutputMessage:
        return OutputMessage(id=self._item_id, content=[OutputText(text="".join(choice.texts))], status=status)


def _status(choices: Sequence[Choice]) -> Status:
    last = choices[0].last if choices else None
    if last is None:
        return "in_progress"
    return "incomplete" if last.finish_reason == "length" else "completed"


def _usage(choices: Sequence[Choice]) -> ResponseUsage:
    used = usage(choices)
    details = used.prompt_tokens_details
    return ResponseUsage(
        input_tokens=used.prompt_tokens,
        output_tokens=used.completion_tokens,
        total_tokens=used.total_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=details.cached_tokens if details else 0),
    )


def _message(index: int, item: dict[str, Any]) -> dict[str, Any]:
    """Return an item of `input` as a message of a chat, checked here, where its number is right."""
    where = f"input[{index}]"
    if item.get("type", "message") != "message":
        kind = str(item["type"])[:64]
        raise UnsupportedError(f"{where} is of type {kind!r}, which is not supported: leave it out.", param=_INPUT)
    for key in item.keys() - _OF_ITEMS:
        raise UnsupportedError(f'{where} has "{key[:64]}", which is not supported: leave it out.', param=_INPUT)
    content = item.get("content")
    if isinstance(content, list):
        content = [_part(part) for part in content]
    message = {"role": item.get("role"), "content": content}
    plain_message(index, message)
    return message


def _part(part: object) -> object:
    """Return a text as a chat has it; what is no text is left to be refused there."""
    is_text = isinstance(part, dict) and part.get("type") in _TEXTS
    return {"type": "text", "text": part.get("text")} if is_text and isinstance(part, dict) else part


def _format(wanted: TextFormat) -> ResponseFormat:
    if wanted.type != "json_schema":
        return ResponseFormat(type=wanted.type)
    if wanted.schema is UNSET:
        raise RequestError('A "text.format" of type json_schema needs a "schema".', param="text")
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(name="response", schema=wanted.schema))
