"""The bodies of OpenAI's `POST /v1/responses`, as far as the embedded engine has them: text, and no state."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

Status = Literal["in_progress", "completed", "incomplete"]


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`json_schema` lies flat here, other than in a chat's `response_format`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | UnsetType = UNSET
    schema: dict[str, Any] | UnsetType = UNSET
    description: str | UnsetType | None = UNSET
    strict: bool | UnsetType | None = UNSET


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat = TextFormat()


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`input` is the user's text, or messages."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextOptions = TextOptions()
    stream: bool = False
    user: str | None = None  # this and the next two: a name for the client's end, without effect
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # vLLM's extensions
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    priority: int = 0
    cache_salt: str | None = None


class OutputText(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    type: Literal["output_text"] = "output_text"
    annotations: list[Any] = []
    logprobs: list[Any] = []


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    content: list[OutputText]
    status: Status
    role: Literal["assistant"] = "assistant"
    type: Literal["message"] = "message"


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0  # those that cost extra; none do


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """The answer; in a stream, what is known of it."""

    id: str
    created_at: int  # Unix seconds
    model: str
    status: Status
    output: list[OutputMessage]
    usage: ResponseUsage | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    text: TextOptions
    user: str | None
    object: Literal["response"] = "response"
    background: bool = False
    error: None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    store: bool = False
    tool_choice: Literal["none"] = "none"
    tools: list[Any] = []
    truncation: Literal["disabled"] = "disabled"
