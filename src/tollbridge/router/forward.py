"""Requests that any ready worker can answer and that take no part in a split: tokenize, embeddings and the like."""

from __future__ import annotations

from aiohttp import web

from tollbridge.errors import UnsupportedError
from tollbridge.policy.rules import least_loaded
from tollbridge.router import legs
from tollbridge.router.context import Context
from tollbridge.router.ingress import Call
from tollbridge.router.stream import take_report
from tollbridge.router.upstream import deadline, failure_of

# Named one by one: a worker's administrative paths must not become reachable through the router.
PATHS = ("/tokenize", "/detokenize", "/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/responses")


async def forward(context: Context, call: Call) -> web.Response:
    """Return the answer of the least loaded ready worker that serves the call's model.

    UnsupportedError for a stream, which these paths are not passed as.
    """
    if call.stream:
        raise UnsupportedError(f"The router does not stream {call.path}: leave stream out.", param="stream")
    chosen = least_loaded(context.fleet.view(call.model).ready(), first="decode")
    worker, headers = context.fleet[chosen.name], legs.headers_for(call)
    async with deadline(worker, context.config.router.first_byte_timeout_s):
        with context.fleet.serving(worker, "decode"):
            async with context.upstream.request(
                worker, "POST", call.path, body=legs.local_body(call), headers=headers
            ) as response:
                body = await context.upstream.read(worker, response)
    failure = failure_of(worker, response.status, body)
    if failure is not None:
        raise failure
    return web.Response(status=response.status, body=take_report(body)[0], content_type=response.content_type)
