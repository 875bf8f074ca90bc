"""The OpenAI-compatible HTTP bodies, as structs. Field names and meanings are OpenAI's and vLLM's.

Unknown request fields are kept out of the structs on purpose: the worker door checks the raw keys against
`msgspec.structs.fields` and refuses an unsupported parameter by name (never ignores it).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Sampling(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # vLLM extension; -1 or 0: all
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None  # vLLM extension
    ignore_eos: bool = False  # vLLM extension
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    user: str | None = None
    cache_salt: str | None = None  # vLLM extension: keeps tenants' prefix caches apart
    kv_transfer_params: dict[str, Any] | None = None


class CompletionRequest(_Sampling, frozen=True, kw_only=True):
    """`POST /v1/completions`. `prompt` is text or token ids."""

    prompt: str | list[int] | list[str] | list[list[int]]
    add_special_tokens: bool = True  # vLLM extension
    return_token_ids: bool = False  # vLLM extension: choices carry `token_ids`


class ChatCompletionRequest(_Sampling, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True  # vLLM extension
    return_token_ids: bool = False  # vLLM extension


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int = 0  # own prefix cache hits plus tokens loaded over the wire, as vLLM counts them


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


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
