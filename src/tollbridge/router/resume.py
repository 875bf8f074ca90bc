"""Which streams can be continued on another worker when theirs breaks off, and the request that does it. Pure.

The continuation is a completion whose prompt is the prompt's token ids and those of the answer so far; workers name
them with `return_token_ids`, which the router asks for. The rest of the answer must be what the first worker would have
said: certain where draws are reproducible (greedy; or seeded, between embedded engines, whose draws depend on seed
and position), as good where the client left the draws to chance. Otherwise the client gets an error event. Embedded
engines are told how many of the tokens were generated (`continued_tokens`), so that penalties and structures go on as
well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from tollbridge.router.ingress import Body, Call

# Why a stream was not continued; the codes are metric labels.
OBSTACLES: dict[str, str] = {
    "several_choices": "it has several choices or prompts",
    "logprobs": "it carries log probabilities, whose offsets would be wrong",
    "tools": "it may hold tool calls, which a continuation cannot parse",
    "structured_output": "its output is bound to a structure, and the continuation would start it anew",
    "penalties": "it penalises what was generated, and a continuation takes that for prompt",
    "parameter": "it has a parameter whose meaning in a continuation is not known",
    "seeded": "its draws are seeded, and these workers do not draw by seed and position",
    "reasoning": "it has reasoning content, which a continuation cannot tell from text",
    "no_token_ids": "the worker did not name its token ids",
    "seam": "its text does not fit its tokens",
    "diverged": "the other worker said something else",
    "too_often": "it has been continued too often",
    "budget": "the router's budget for further attempts is spent",
    "no_worker": "no other worker could take it",
}

_NULL = (b"null",)
_OFF = (b"null", b"false", b"0", b"0.0", b"[]", b"{}", b'""')
_KEPT = frozenset({
    "model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "user",
    "cache_salt", "repetition_penalty", "logit_bias", "bad_words", "allowed_token_ids", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "priority",
})  # fmt: skip
_REPLACED = frozenset({
    "prompt", "messages", "max_tokens", "max_completion_tokens", "min_tokens", "stream", "stream_options",
    "return_token_ids",
})  # fmt: skip
# What shapes the prompt, which is known as ids by then, and what no worker acts on.
_DROPPED = frozenset({
    "add_special_tokens", "add_generation_prompt", "continue_final_message", "chat_template",
    "chat_template_kwargs", "documents", "reasoning_effort", "truncate_prompt_tokens", "metadata", "store",
    "service_tier", "parallel_tool_calls", "request_id", "include_reasoning", "thinking_token_budget",
    "return_tokens_as_token_ids",
})  # fmt: skip
_REFUSED: dict[str, tuple[str, tuple[bytes, ...]]] = {  # name -> reason, the values at which it asks for nothing
    "n": ("several_choices", (b"null", b"1")),
    "best_of": ("several_choices", (b"null", b"1")),
    "use_beam_search": ("several_choices", _OFF),
    "logprobs": ("logprobs", (b"null", b"false")),
    "top_logprobs": ("logprobs", _OFF),
    "prompt_logprobs": ("logprobs", _NULL),
    "echo": ("parameter", _OFF),
    "suffix": ("parameter", _OFF),
    "tools": ("tools", _OFF),
    "functions": ("tools", _OFF),
    "tool_choice": ("tools", (b"null", b'"none"')),
    "function_call": ("tools", (b"null", b'"none"')),
    "response_format": ("structured_output", (b"null", b'{"type":"text"}', b'{"type": "text"}')),
    "structured_outputs": ("structured_output", _NULL),
    "guided_json": ("structured_output", _NULL),
    "guided_regex": ("structured_output", _NULL),
    "guided_choice": ("structured_output", _NULL),
    "guided_grammar": ("structured_output", _NULL),
    "presence_penalty": ("penalties", _OFF),
    "frequency_penalty": ("penalties", _OFF),
}
# What embedded engines continue all the same: they are told which tokens of the prompt were generated.
_CONTINUED = frozenset({"penalties", "structured_output"})
_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions


@dataclass(frozen=True, kw_only=True)
class Resumable:
    """What a continuation needs to know of a request."""

    kind: str  # "completion" or "chat"
    max_tokens: int | None  # of the whole answer; None: as many as fit the context
    min_tokens: int
    stop: tuple[str, ...]
    greedy: bool
    seeded: bool  # by the client
    wants_ids: bool
    wants_usage: bool
    continuous_usage: bool


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Fields(msgspec.Struct, frozen=True):
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    seed: int | None = None
    return_token_ids: bool | None = None
    stream_options: _StreamOptions | None = None


def obstacle_of(body: Body, *, embedded: bool = False) -> str | None:
    """Return the code of the first reason why a stream with this body can never be continued, None when it can.

    `embedded`: all workers are embedded engines.
    """
    for name, value in body.items():
        if name in _REFUSED:
            reason, harmless = _REFUSED[name]
            if bytes(value) not in harmless and not (embedded and reason in _CONTINUED):
                return reason
        elif name not in _KEPT and name not in _REPLACED and name not in _DROPPED and bytes(value) not in _NULL:
            return "parameter"
    prompt = bytes(body.get("prompt", b"")).lstrip()
    if prompt.startswith(b"[") and prompt[1:].lstrip()[:1] in (b"[", b'"'):
        return "several_choices"
    return None


def maybe_resumable(call: Call, *, embedded: bool = False) -> Resumable | None:
    """Return what is needed to continue `call`; None when it is no stream, or can never be continued."""
    if not call.stream or obstacle_of(call.body, embedded=embedded) is not None:
        return None
    try:
        wanted = {name: call.body[name] for name in _Fields.__struct_fields__ if name in call.body}  # not a long prompt
        fields = msgspec.json.decode(msgspec.json.encode(wanted), type=_Fields)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None  # the worker will refuse it
    chat = call.path.endswith("/chat/completions")
    options = fields.stream_options or _StreamOptions()
    return Resumable(
        kind="chat" if chat else "completion",
        max_tokens=fields.max_completion_tokens or fields.max_tokens or (None if chat else _COMPLETION_TOKENS),
        min_tokens=fields.min_tokens or 0,
        stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
        greedy=fields.temperature == 0,
        seeded=fields.seed is not None,
        wants_ids=bool(fields.return_token_ids),
        wants_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
    )


def with_token_ids(call: Call, seed: int | None) -> Call:
    """Return `call` asking for token ids, and drawn by `seed` unless the client has its own."""
    body: Body = {**call.body, "return_token_ids": msgspec.Raw(b"true")}
    if seed is not None and bytes(body.get("seed", b"null")) == b"null":
        body["seed"] = msgspec.Raw(str(seed).encode())
    return replace(call, body=body)


def continuation_body(
    call: Call, resumable: Resumable, prompt: list[int], *, num_kept: int, room: int | None, embedded: bool = False
) -> bytes:
    """Return the request that goes on behind `prompt`, the last `num_kept` tokens of which were generated.

    An embedded engine is told that they were. `room` is how many tokens fit the model's context behind `prompt`, None
    when nobody knows.
    """
    body: dict[str, object] = {name: value for name, value in call.body.items() if name in _KEPT}
    if embedded:
        kept = [name for name, (reason, _) in _REFUSED.items() if reason in _CONTINUED]
        body |= {name: call.body[name] for name in kept if name in call.body}
        body["continued_tokens"] = num_kept
    left = None if resumable.max_tokens is None else resumable.max_tokens - num_kept
    limits = [limit for limit in (left, room) if limit is not None]
    if limits:
        body["max_tokens"] = min(limits)
    if resumable.min_tokens > num_kept:
        body["min_tokens"] = resumable.min_tokens - num_kept
    options = {"include_usage": resumable.wants_usage, "continuous_usage_stats": resumable.continuous_usage}
    body |= {"prompt": prompt, "stream": True, "stream_options": options, "return_token_ids": True}
    return msgspec.json.encode(body)
