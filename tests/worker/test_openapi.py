"""Random requests made from the worker's own description: none may end in a 5xx, hang, or get an answer not described.

The door is the real one, in a thread; behind it is the fake engine, so that refusals and answers are quick.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from tests.worker.support import Client, fake_serving
from tollbridge.worker import openapi

schema = schemathesis.openapi.from_dict(openapi.document())
CHECKS = (not_a_server_error, content_type_conformance, response_schema_conformance)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Run a worker's door in another thread while the module lasts."""
    ready, urls, loop = threading.Event(), [], asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with fake_serving() as client:
            urls.append(client.url)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(120)
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(120)
        loop.close()


@schema.parametrize()
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
def test_no_request_hurts(case: schemathesis.Case, url: str) -> None:
    case.validate_response(case.call(base_url=url, timeout=120), checks=CHECKS)


async def test_every_path_is_described(client: Client) -> None:
    from tollbridge.worker.app import build_app

    routes = build_app(client.door).router.routes()
    served = {str(route.resource.canonical) for route in routes if route.resource}
    status, body = await client.get("/openapi.json")
    assert (status, served) == (200, set(json.loads(body)["paths"]))
