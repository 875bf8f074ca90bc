"""One real stack, with a collector of traces beside it, for all tests of the dashboard that need one.

The router runs on uvloop, so the tests inside its process do.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.router.conftest import pytest_asyncio_loop_factories
from tests.support.collector import Collector, collecting
from tests.support.stack import Stack, post, running

__all__ = ["pytest_asyncio_loop_factories"]


@pytest.fixture(scope="package")
def collector() -> Iterator[Collector]:
    with collecting() as it:
        yield it


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, collector: Collector) -> Iterator[Stack]:
    """A stack that sends its traces to the collector and has served some requests, both ways."""
    told = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in told.items():
            patch.setenv(name, value)
        with running(Stack(tmp_path_factory.mktemp("ui"), str(tiny_model_dir), policy="adaptive")) as it:
            for number in range(6):
                ask(it, "split", [number + 5] * 200)
                ask(it, "local", [number + 50] * 40)
            ask(it, "local", [50] * 40)  # once more: some of it is in a prefix cache
            yield it


def ask(stack: Stack, policy: str, prompt: list[int] | str, **more: object) -> None:
    """Let the router answer a prompt by `policy`; keys of `more` that begin with x_ are headers."""
    headers = {name.replace("_", "-"): str(value) for name, value in more.items() if name in HEADERS}
    body = {"prompt": prompt, "max_tokens": 8, "stream": True, "ignore_eos": True}
    body |= {name: value for name, value in more.items() if name not in HEADERS}
    answer = post(stack.url + "/v1/completions", body, headers={"x-tollbridge-policy": policy, **headers})
    assert answer.status == 200, answer.raw


HEADERS = ("x_request_id", "traceparent", "authorization")
