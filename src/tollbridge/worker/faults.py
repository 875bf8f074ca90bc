"""Errors as answers: OpenAI's shape for our own, for the HTTP framework's, and for those nobody foresaw."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from tollbridge.errors import RequestError, TollbridgeError, UnavailableError
from tollbridge.obs.logs import request_line
from tollbridge.wire.openai import ErrorBody, ErrorInfo, error_body

log = logging.getLogger("tollbridge.worker")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

RETRY_AFTER_S = "1"


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every exception of a handler into a JSON answer; what is not ours is logged, and told in one sentence."""
    try:
        return await handler(request)
    except TollbridgeError as error:
        answer, kind, param = _own(error), error.error_type, error.param
    except web.HTTPException as error:
        answer, kind, param = _framework(request, error), "http", None
    except RecursionError:  # nothing here recurses but what walks through a body
        answer, kind, param = _own(RequestError("The request body is nested too deeply: flatten it.")), "depth", None
    except Exception:
        log.exception("unforeseen exception: path=%s", request.path)
        return _own(unforeseen())
    # Not the message: it may quote the request.
    request_line(log, path=request.path[:200], status=answer.status, type=kind, param=param)
    return answer


def unforeseen() -> TollbridgeError:
    """Return all that a client may know of an exception that nobody foresaw."""
    return TollbridgeError("The worker failed on this request: its log has the traceback.")


def _own(error: TollbridgeError) -> web.Response:
    headers = {"Retry-After": RETRY_AFTER_S} if isinstance(error, UnavailableError) else {}
    return _json(error.status, error_body(error), headers)


def _framework(request: web.Request, error: web.HTTPException) -> web.Response:
    allow = error.headers.get("Allow", "")
    limit_mib = request.client_max_size >> 20
    sentence = {
        404: f"There is no {request.path[:200]} here: this worker generates text, see /openapi.json for its paths.",
        405: f"{request.path} does not take {request.method[:20]}: use {allow}.",
        408: "The request body did not arrive in time: send it again.",
        413: f"The request body is larger than the {limit_mib} MiB that this worker takes: shorten it.",
    }.get(error.status, f"{error.reason}.")
    kind = "not_found_error" if error.status == 404 else "invalid_request_error"
    body = ErrorBody(error=ErrorInfo(message=sentence, type=kind, code=error.status))
    return _json(error.status, body, {"Allow": allow} if allow else {})


def _json(status: int, body: ErrorBody, headers: dict[str, str]) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json", headers=headers)
