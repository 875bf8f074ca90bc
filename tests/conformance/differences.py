"""Where our servers answer otherwise than vLLM does, and why: one table for the tests and for docs/api.md.

A row with a `body` is checked against real servers: what vLLM answers, and what we do instead. `where` says who we are:
the embedded engine with or without a router, its worker alone, or also a router with vLLM behind it. The command
`python -m tests.conformance.differences` writes the table into docs/api.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"
BEGIN, END = "<!-- differences: python -m tests.conformance.differences -->\n", "<!-- end -->\n"

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
_USER = {"role": "user", "content": "What is a toll?"}
_TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
_NAMED = {"type": "function", "function": {"name": "get_weather"}}
_NEVER_IGNORED = "a parameter without effect is refused by name, never ignored"


@dataclass(frozen=True)
class Difference:
    """`asks` is the request in words; with a `path` and a `body` it is made, and `vllm` and `ours` are status codes."""

    asks: str
    vllm: int | str
    ours: int | str
    why: str
    where: Literal["embedded", "worker", "both"] = "embedded"
    path: str = ""
    body: Any = None
    headers: tuple[tuple[str, str], ...] = ()
    param: str | None = None  # of our refusal


def _text(asks: str, more: dict[str, Any], why: str, *, param: str | None = None, vllm: int = 200) -> Difference:
    body = {"model": "MODEL", "prompt": "A toll", "max_tokens": 2, "temperature": 0, **more}
    return Difference(asks, vllm, 400, why, path=TEXT, body=body, param=param or next(iter(more)))


def _chat(asks: str, more: dict[str, Any], why: str, *, param: str | None = None) -> Difference:
    body = {"model": "MODEL", "messages": [_USER], "max_tokens": 2, "temperature": 0, **more}
    return Difference(asks, 200, 400, why, path=CHAT, body=body, param=param or next(iter(more)))


DIFFERENCES: tuple[Difference, ...] = (
    _text("a parameter that nobody knows", {"max_token": 2}, _NEVER_IGNORED),
    _text("`best_of` above 1", {"best_of": 2}, _NEVER_IGNORED),
    _text(
        "an unknown member of `stream_options`",
        {"stream": True, "stream_options": {"usage": True}},
        _NEVER_IGNORED,
        param="stream_options",
    ),
    _text("`truncate_prompt_tokens`", {"truncate_prompt_tokens": 1}, "the embedded engine does not cut prompts"),
    Difference(
        "`kv_transfer_params` of a client", 200, 400, "transfers are the router's to order; it takes out a client's",
        where="worker", path=TEXT, param="kv_transfer_params",
        body={"prompt": "a", "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}},
    ),
    _chat("`functions`", {"functions": [{"name": "x"}]}, "OpenAI has replaced them by `tools`"),
    _chat("`modalities` other than text", {"modalities": ["audio"]}, _NEVER_IGNORED),
    _chat("`service_tier` other than auto or default", {"service_tier": "flex"}, _NEVER_IGNORED),
    _chat("`store`", {"store": True}, "nothing is stored"),
    _chat("`metadata`", {"metadata": {"a": "b"}}, "nothing is stored"),
    _chat("`reasoning_effort`", {"reasoning_effort": "low"}, "the embedded engine has no reasoning parser"),
    _chat("a message without `content`", {"messages": [{"role": "user"}]}, "most likely a mistake", param="messages"),
    _chat(
        "another structure beside a call that is demanded",
        {"tools": [_TOOL], "tool_choice": _NAMED, "response_format": {"type": "json_object"}},
        "one of them would be ignored",
        param="tool_choice",
    ),
    Difference(
        "arguments of a demanded call of a tool that is not `strict`", "any JSON", "within its `parameters`",
        "a call that the tool cannot take helps nobody",
    ),
    Difference("`content` beside a call that is demanded", "an empty text", "null", "as OpenAI"),
    Difference(
        "`store` of a response", 200, 400, "nothing is stored: each request carries its conversation",
        path="/v1/responses", body={"model": "MODEL", "input": "Hello", "max_output_tokens": 2, "store": True},
        param="store",
    ),
    Difference(
        "the last event of a response that `max_output_tokens` ends", "`response.completed`", "`response.incomplete`",
        "as OpenAI",
    ),
    Difference(
        "`strict` of a tool that the model may call of its own accord", "binds the arguments", "has no effect",
        "only calls that are demanded are bound, and always within their `parameters`",
    ),
    Difference(
        "a response with tools, reasoning or background work", "as the model allows", 400,
        "the embedded engine's responses are text; chat completions have tools",
    ),
    Difference(
        "`/detokenize` of an id beyond the vocabulary", 200, 400, "it has no text",
        path="/detokenize", body={"tokens": [99_999]}, param="tokens",
    ),
    Difference(
        "`/tokenize` of a prompt and messages at once", 200, 400, "one of them would be ignored",
        path="/tokenize", body={"prompt": "a", "messages": [_USER]}, param="prompt",
    ),
    Difference(
        "a body that is not called `application/json`", 400, 200, "what is JSON is taken for JSON", where="both",
        path=TEXT, body=b'{"prompt": "a", "max_tokens": 1}', headers=(("content-type", "text/plain"),),
    ),
    Difference(
        "`type` of an error", "`BadRequestError`, `NotFoundError`, …", "`invalid_request_error`, `not_found_error`, …",
        "OpenAI's names; `unsupported`, `context_length_exceeded` and `overloaded` tell more", where="both",
    ),
    Difference(
        "`param` of an error", "sometimes a path (`body.max_tokens`) or null", "the parameter", "clients can show it",
    ),
    Difference(
        "a path that is not there", '`{"detail": "Not Found"}`', "an error body in OpenAI's shape",
        "one shape for all errors", where="both",
    ),
    Difference(
        "the first chunk of a chat stream", "the role, and no content", "the role and the first content",
        "one event less", where="embedded",
    ),
    Difference(
        "the role of an answer without generation prompt", "that of the last message", "assistant",
        "OpenAI's type allows nothing else",
    ),
    Difference(
        "an answer that ends inside a character", "the half character is left out", "it ends with U+FFFD",
        "what was generated is shown",
    ),
    Difference(
        "usage of an output that a structure ends", "counts an end-of-sequence token", "does not generate one",
        "one step less",
    ),
    Difference(
        "a stream of `/inference/v1/generate` with `n` above 1", "ends with an error event", "is served",
        "a mistake of vLLM 0.31", where="embedded",
    ),
    Difference(
        "fields without meaning here (`system_fingerprint`, `service_tier`, `routed_experts`, …)", "null or a value",
        "absent", "clients read absent as null",
    ),
    Difference(
        "`/v1/messages`, `/v1/load`, audio and administrative paths", "some", "404",
        "the router names the paths that it passes, so that a worker's administration stays closed", where="both",
    ),
)  # fmt: skip


def table() -> str:
    """Return the rows as Markdown."""
    heads = "| request | vLLM | ours | where | why |\n|---|---|---|---|---|\n"
    return heads + "".join(f"| {d.asks} | {d.vllm} | {d.ours} | {d.where} | {d.why} |\n" for d in DIFFERENCES)


def written(document: str) -> str:
    """Return `document` with the table in its place."""
    before, _, rest = document.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
