"""What the router says of its own interface: `GET /openapi.json`.

Bodies of the generating paths are the workers' business: only what the router itself checks or acts on is spelt out.
"""

from __future__ import annotations

from typing import Any

import tollbridge
from tollbridge.policy import registry
from tollbridge.router import forward
from tollbridge.router.ingress import (
    GENERATE,
    MAX_PRIORITY,
    MAX_TIMEOUT_S,
    OVERRIDE_HEADER,
    PRIORITY_HEADER,
    TIMEOUT_HEADER,
)

Document = dict[str, Any]

_REFUSALS = {
    "400": "The request is wrong.",
    "401": "The API key is missing or wrong.",
    "404": "No such model, record or path.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "429": "Too many requests wait already; Retry-After says when to come back.",
}
_FAILURES = {
    "502": "A worker failed, and no other could take the request.",
    "503": "Nobody can serve it now; Retry-After says when to come back.",
    "504": "The request's deadline has passed.",
}
_GENERATING: Document = {
    "model": {"type": ["string", "null"]},
    "max_tokens": {"type": ["integer", "null"], "minimum": 1},
    "temperature": {"type": ["number", "null"], "minimum": 0},
    "seed": {"type": ["integer", "null"]},
    "stop": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
    "stream": {"type": ["boolean", "null"]},
    "n": {"type": ["integer", "null"], "minimum": 1},
}
_IDS: Document = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TOKENS_IN: Document = {
    "model": {"type": ["string", "null"]},
    "sampling_params": {"type": "object"},
    "stream": {"type": ["boolean", "null"]},
}
_PROMPT: Document = {
    "anyOf": [
        {"type": "string"},
        _IDS,
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": _IDS},
    ]
}
_MESSAGES: Document = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"type": "string"}, "content": {"type": "string"}},
    },
}
_EVENT: Document = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
_ERROR: Document = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["integer", "string", "null"]},
            },
        }
    },
}


def document() -> Document:
    """Return the OpenAPI 3.1 document."""
    paths: Document = {
        "/v1/completions": _generate("Complete a prompt.", "prompt", _PROMPT),
        "/v1/chat/completions": _generate("Continue a conversation.", "messages", _MESSAGES),
        GENERATE: _generate("Continue token ids; the answer is token ids.", "token_ids", _IDS, _TOKENS_IN),
        "/v1/models": _show("The models that ready workers serve."),
        "/v1/models/{model}": _show("One of them.", _in_path("model")),
        "/health": _show("200 while a worker can serve.", more={"503": "None can."}, open_to_all=True),
        "/metrics": _show("Prometheus metrics.", kind="text/plain", open_to_all=True),
        "/fleet": _show("Everything known of every worker."),
        "/decisions": _show("The newest decisions.", _limit()),
        "/decisions/{id}": _show("One decision and what became of it.", _in_path("id")),
        "/openapi.json": _show("This document."),
    }
    for path in forward.PATHS:
        operation = _operation(f"Passed on to a worker: {path}.", {**_REFUSALS, **_FAILURES}) | _body({}, [])
        paths[path] = {"post": operation}
    paths[forward.RESPONSES]["post"]["responses"]["200"]["content"]["text/event-stream"] = {"schema": _EVENT}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tollbridge router", "version": tollbridge.__version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _generate(summary: str, field: str, schema: Document, more: Document = _GENERATING) -> Document:
    parameters = [
        _header(OVERRIDE_HEADER, {"type": "string", "enum": list(registry.POLICIES)}, "The policy; may be refused."),
        _header(PRIORITY_HEADER, {"type": "integer", "minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY},
                "Lower is served earlier, among the requests of one tenant."),
        _header(TIMEOUT_HEADER, {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S},
                "Seconds within which the request must end."),
    ]  # fmt: skip
    operation = _operation(summary, {**_REFUSALS, **_FAILURES}) | _body({field: schema, **more}, [field])
    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": _EVENT}
    return {"post": operation | {"parameters": parameters}}


def _show(
    summary: str,
    *parameters: Document,
    kind: str = "application/json",
    more: dict[str, str] | None = None,
    open_to_all: bool = False,
) -> Document:
    refusals = {} if open_to_all else {code: _REFUSALS[code] for code in ("400", "401", "404")}
    operation = _operation(summary, {**refusals, **(more or {})}, kind=kind)
    if open_to_all:
        operation["security"] = []
    return {"get": operation | ({"parameters": list(parameters)} if parameters else {})}


def _operation(summary: str, others: dict[str, str], kind: str = "application/json") -> Document:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses: Document = {"200": {"description": "Done.", "content": {kind: {"schema": {}}}}}
    for code, text in others.items():
        plain: Document = {"application/json": {"schema": {}}}  # /health has its own 503
        responses[code] = {"description": text, "content": plain if code == "503" else error}
    return {"summary": summary, "responses": responses, "security": [{"key": []}, {}]}


def _body(properties: Document, required: list[str]) -> Document:
    schema = {"type": "object", "properties": properties, "required": required}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _header(name: str, schema: Document, text: str) -> Document:
    return {"name": name, "in": "header", "schema": schema, "description": text}


def _in_path(name: str) -> Document:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _limit() -> Document:
    return {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 0, "maximum": 1000}}
