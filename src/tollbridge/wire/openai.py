"""The OpenAI-compatible HTTP bodies, as structs. Field names and meanings are OpenAI's and vLLM's.

A field typed `X | UnsetType` is left out of the JSON while unset, where vLLM leaves it out; the others are null.
Unknown request fields are kept out of the structs on purpose: the worker door checks the raw keys against
`msgspec.structs.fields` and refuses an unsupported parameter by name (never ignores it).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from tollbridge.errors import TollbridgeError


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None  # structures are always followed strictly


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's; exactly one of them."""

    json: str | dict[str, Any] | None = None  # a JSON schema
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class _Sampling(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None  # by token id
    response_format: ResponseFormat | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    user: str | None = None
    # vLLM's extensions
    top_k: int | None = None  # -1 or 0: all
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int = 0
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool = False  # in logprobs, tokens as "token_id:7"
    structured_outputs: StructuredOutputs | None = None
    priority: int = 0  # the lower, the earlier
    cache_salt: str | None = None  # keeps tenants' prefix caches apart
    kv_transfer_params: dict[str, Any] | None = None
    # ours: how many tokens at the end of the prompt another worker has generated of this answer
    continued_tokens: int = 0


class CompletionRequest(_Sampling, frozen=True, kw_only=True):
    """`POST /v1/completions`. `prompt` is text, or token ids, or a list of either; the types never mix."""

    prompt: str | list[int | str | list[int]]
    echo: bool = False
    logprobs: int | None = None  # how many of the likeliest tokens to name beside each generated one
    add_special_tokens: bool = True  # vLLM extension
    return_token_ids: bool = False  # vLLM extension: choices carry `token_ids`


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /inference/v1/generate`, vLLM's."""

    token_ids: list[int]
    sampling_params: msgspec.Raw
    model: str | None = None
    request_id: str | None = None  # x-request-id is what counts
    return_token_ids: bool = False  # those of the prompt
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0
    kv_transfer_params: dict[str, Any] | None = None


class Function(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the model may call. The order of the fields is that in which templates write them."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | UnsetType = UNSET


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class ChatCompletionRequest(_Sampling, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True  # vLLM extension
    continue_final_message: bool = False  # vLLM extension
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM extension
    return_token_ids: bool = False  # vLLM extension
    tools: list[Tool] | None = None
    tool_choice: str | Tool | None = None  # "none", "auto", "required", or the name of one
    parallel_tool_calls: bool = True


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int = 0  # own prefix cache hits plus tokens loaded over the wire, as vLLM counts them


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class ReleaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /tollbridge/release`, the router's own."""

    kv_transfer_params: dict[str, Any]


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: int | str | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """Every error answer: `{"error": {"message", "type", "param", "code"}}`."""

    error: ErrorInfo


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: str = "tollbridge"
    root: str | None = None
    max_model_len: int | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    text_offset: list[int]
    token_logprobs: list[float | None]  # null: of the first token of a prompt
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class ChatTopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(ChatTopLogprob, frozen=True, kw_only=True):
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[ChatLogprob]


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by position, then by token id


class _Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # vLLM extension: the stop string or token id that ended it
    token_ids: list[int] | UnsetType = UNSET  # with `return_token_ids`


class CompletionChoice(_Choice, frozen=True, kw_only=True):
    """Of a completion, whole or chunk: a chunk's `text` and `token_ids` are the new ones."""

    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # with `return_token_ids`; of a stream, in the first chunk


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: str  # JSON


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the model made; of a stream it comes whole, in one chunk, and has an index."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | UnsetType = UNSET


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    content: str | None  # null: nothing but tool calls
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(_Choice, frozen=True, kw_only=True):
    message: ChatMessage
    logprobs: ChatLogprobs | None = None


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    content: str
    role: Literal["assistant"] | UnsetType = UNSET  # in the first chunk
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(_Choice, frozen=True, kw_only=True):
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int  # Unix seconds
    model: str
    usage: Usage | UnsetType = UNSET  # of a stream: in the last chunk, or in each with `continuous_usage_stats`
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET  # `{"tollbridge": WorkerReport}`, for the router only


class Completion(_Answer, frozen=True, kw_only=True):
    """The answer to `POST /v1/completions`; OpenAI gives a chunk of its stream the same shape."""

    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"


class ChatCompletion(_Answer, frozen=True, kw_only=True):
    choices: list[ChatChoice]
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(_Answer, frozen=True, kw_only=True):
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    prompt_token_ids: list[int] | UnsetType = UNSET


class TokensChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A choice of `/inference/v1/generate`."""

    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `/inference/v1/generate`, whole or chunk; a chunk has no model and no time."""

    request_id: str
    choices: list[TokensChoice]
    model: str | UnsetType = UNSET
    created: int | UnsetType = UNSET
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /tokenize`, vLLM's: text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None  # None: those of a prompt, none of a chat, whose template writes them
    return_token_strs: bool = False
    add_generation_prompt: bool = True  # this and all that follows: of messages
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /detokenize`, vLLM's."""

    tokens: list[int]
    model: str | None = None


class DetokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str


def error_body(error: TollbridgeError) -> ErrorBody:
    """Return the body that tells a client of `error`; `code` is the HTTP status, as in vLLM."""
    return ErrorBody(
        error=ErrorInfo(message=error.message, type=error.error_type, param=error.param, code=error.status)
    )
