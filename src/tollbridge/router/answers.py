"""Error answers in OpenAI's shape, for our own errors and for the HTTP framework's."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from tollbridge.errors import TollbridgeError, UnavailableError
from tollbridge.wire.openai import ErrorBody, ErrorInfo, error_body

log = logging.getLogger("tollbridge.router")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
JSON = "application/json"


def error_document(error: TollbridgeError) -> bytes:
    """Return the JSON document that tells a client about `error`."""
    return msgspec.json.encode(error_body(error))


def error_answer(error: TollbridgeError) -> web.Response:
    """Return the whole answer; retryable ones carry Retry-After."""
    headers = {"Retry-After": f"{error.retry_after_s:.0f}"} if isinstance(error, UnavailableError) else None
    return web.Response(status=error.status, body=error_document(error), content_type=JSON, headers=headers)


def json_answer(value: object, status: int = 200) -> web.Response:
    """Return `value` as a JSON answer."""
    return web.Response(status=status, body=msgspec.json.encode(value), content_type=JSON)


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every exception that leaves a handler into an OpenAI-shaped answer."""
    try:
        return await handler(request)
    except TollbridgeError as error:
        return error_answer(error)
    except web.HTTPException as error:
        return _framework_answer(request, error)
    except Exception:
        log.exception("request failed: path=%s", request.path)
        return error_answer(TollbridgeError("The router failed on this request: its log has the traceback."))


def _framework_answer(request: web.Request, error: web.HTTPException) -> web.Response:
    messages = {
        404: f"There is no {request.path[:200]} here: see /openapi.json for the paths that this router passes.",
        405: f"{request.path} does not take {request.method[:20]}: use {error.headers.get('Allow', 'another method')}.",
        413: f"The request body is larger than the router takes ({request.client_max_size >> 20} MiB): shorten it.",
    }
    message = messages.get(error.status, error.reason or "The request was refused.")
    kind = "not_found_error" if error.status == 404 else "invalid_request_error"
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
    body = msgspec.json.encode(ErrorBody(error=ErrorInfo(message=message, type=kind, code=error.status)))
    return web.Response(status=error.status, body=body, content_type=JSON, headers=headers)
