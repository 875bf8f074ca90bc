"""What a worker says of its own interface: `GET /openapi.json`. The bodies are read off the structs that parse them."""

from __future__ import annotations

from typing import Any

import msgspec

import tollbridge
from tollbridge.wire import openai as wire
from tollbridge.wire.params import RELEASE_PATH
from tollbridge.wire.responses import Response, ResponsesRequest
from tollbridge.wire.status import WorkerStatus

Document = dict[str, Any]

_JSON = "application/json"
_POSTS: dict[str, tuple[str, type, type | None]] = {
    "/v1/completions": ("Complete prompts.", wire.CompletionRequest, wire.Completion),
    "/v1/chat/completions": ("Continue a conversation.", wire.ChatCompletionRequest, wire.ChatCompletion),
    "/v1/responses": ("Continue a conversation, without state.", ResponsesRequest, Response),
    "/inference/v1/generate": ("Continue token ids; the answer is token ids.", wire.GenerateRequest, wire.Tokens),
    "/tokenize": ("The token ids of a text or a chat.", wire.TokenizeRequest, wire.TokenizeResponse),
    "/detokenize": ("The text of token ids.", wire.DetokenizeRequest, wire.DetokenizeResponse),
    RELEASE_PATH: ("Give up a send that nobody will fetch; the router's own.", wire.ReleaseRequest, None),
}
_GETS: dict[str, tuple[str, type | None]] = {
    "/v1/models": ("The models served here.", wire.ModelList),
    "/health": ("200 while the worker takes requests.", None),
    "/metrics": ("Prometheus metrics, under vLLM's names where it has them.", None),
    "/version": ("The version.", None),
    "/tollbridge/status": ("Everything known of this worker.", WorkerStatus),
    "/openapi.json": ("This document.", None),
}
_STREAMING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/inference/v1/generate")
_REFUSALS = {
    "400": "The request is wrong, or asks for what this worker does not have.",
    "401": "The kv_transfer_params are not signed by the router.",
    "404": "No such model or path.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "429": "Too many requests are inside; Retry-After says when to come back.",
    "503": "The worker is shutting down.",
}


def document() -> Document:
    """Return the OpenAPI 3.1 document."""
    kinds = [kind for _, asked, answer in _POSTS.values() for kind in (asked, answer)]
    kinds += [kind for _, kind in _GETS.values()] + [wire.ErrorBody]
    used = list(dict.fromkeys(kind for kind in kinds if kind is not None))
    found, components = msgspec.json.schema_components(used, ref_template="#/components/schemas/{name}")
    refs: dict[type | None, Document] = {None: {}, **dict(zip(used, found, strict=True))}
    paths: Document = {path: {"post": _post(path, refs)} for path in _POSTS}
    paths |= {path: {"get": _get(path, refs)} for path in _GETS}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tollbridge worker", "version": tollbridge.__version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": components},
    }


def _post(path: str, refs: dict[type | None, Document]) -> Document:
    summary, asked, answer = _POSTS[path]
    content: Document = {_JSON: {"schema": refs[answer]}}
    if path in _STREAMING:
        content["text/event-stream"] = {"schema": {"type": "object"}}
    error = {_JSON: {"schema": refs[wire.ErrorBody]}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {_JSON: {"schema": refs[asked]}}},
        "responses": {
            "200": {"description": "Done.", "content": content},
            **{code: {"description": text, "content": error} for code, text in _REFUSALS.items()},
        },
    }


def _get(path: str, refs: dict[type | None, Document]) -> Document:
    summary, answer = _GETS[path]
    kind = "text/plain" if path == "/metrics" else _JSON
    done: Document = {"description": "Done."}
    if path != "/health":
        done["content"] = {kind: {"schema": refs[answer]}}
    error = {_JSON: {"schema": refs[wire.ErrorBody]}}
    late = {"503": {"description": _REFUSALS["503"], "content": error}} if path == "/health" else {}
    return {"summary": summary, "responses": {"200": done, **late}}
