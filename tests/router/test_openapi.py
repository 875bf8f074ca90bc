"""Random requests made from the router's own description: none may end in a 5xx or in an answer not described.

The router is a real one in a thread; its workers are stubs that take any body.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from tests.support.router_rig import QUICK, rig
from tests.support.stub_worker import SECRET
from tollbridge.config.cluster import ClusterConfig, WorkerConfig
from tollbridge.router import openapi
from tollbridge.router.app import make_app, make_context

schema = schemathesis.openapi.from_dict(openapi.document())
CHECKS = (not_a_server_error, content_type_conformance, response_schema_conformance)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Run a router in another thread while the module lasts."""
    ready, urls, loop = threading.Event(), [], asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with rig(limits=QUICK, max_body_mib=1) as r:
            urls.append(r.url)
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
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
def test_no_request_hurts(case: schemathesis.Case, url: str) -> None:
    response = case.call(base_url=url, timeout=120)
    case.validate_response(response, checks=CHECKS)
    assert response.status_code != 200 or response.headers["x-request-id"]


def test_every_path_is_described() -> None:
    cluster = ClusterConfig(workers=[WorkerConfig(name="w", url="http://127.0.0.1:1")])
    app = make_app(make_context(cluster, SECRET))
    served = {str(route.resource.canonical).replace(":.+", "") for route in app.router.routes() if route.resource}
    assert served == set(openapi.document()["paths"])
