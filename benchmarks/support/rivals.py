"""Other people's routers, when they are at hand: vllm-router over our trivial upstream, Dynamo over one of its own.

    TOLLBRIDGE_VLLM_ROUTER   the program `vllm-router` (pip install vllm-router)
    TOLLBRIDGE_DYNAMO_PYTHON a Python with `ai-dynamo` and `ai-dynamo-runtime` (installed with --no-deps: 1.6.1 asks
                             for `aisimulate`, whose package on PyPI only points to another registry)

Dynamo's frontend speaks no HTTP to its workers, so it cannot stand in front of the same upstream: it gets its own
mocker, told to be as fast as it can. What is added is then measured against nothing, so only the rate is comparable.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp

_START_S = 60.0


def missing_vllm_router() -> str | None:
    """Return why vllm-router cannot be measured, None when it can."""
    program = os.environ.get("TOLLBRIDGE_VLLM_ROUTER")
    if not program:
        return "TOLLBRIDGE_VLLM_ROUTER is not set (pip install vllm-router)"
    return None if Path(program).exists() else f"{program} does not exist"


def missing_dynamo() -> str | None:
    """Return why Dynamo cannot be measured, None when it can."""
    python = os.environ.get("TOLLBRIDGE_DYNAMO_PYTHON")
    if not python:
        return "TOLLBRIDGE_DYNAMO_PYTHON is not set (pip install --no-deps ai-dynamo ai-dynamo-runtime)"
    return None if Path(python).exists() else f"{python} does not exist"


@contextlib.asynccontextmanager
async def vllm_router(upstreams: list[str]) -> AsyncIterator[str]:
    """Run vllm-router, round robin, over `upstreams` and yield its URL."""
    port, metrics = _free_port(), _free_port()
    argv = [
        os.environ["TOLLBRIDGE_VLLM_ROUTER"], "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin",
        "--prometheus-port", str(metrics), "--log-level", "error", "--worker-urls", *upstreams,
    ]  # fmt: skip
    async with _process(argv):
        url = f"http://127.0.0.1:{port}"
        await _until(url + "/health")
        yield url


@contextlib.asynccontextmanager
async def dynamo(model: Path) -> AsyncIterator[str]:
    """Run Dynamo's frontend and one mocker of `model` and yield the frontend's URL."""
    python, port = os.environ["TOLLBRIDGE_DYNAMO_PYTHON"], _free_port()
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "DYN_FILE_KV": folder, "DYN_LOG": "error"}
        common = ["--discovery-backend", "file", "--request-plane", "tcp"]
        mocker = ["--model-path", str(model), "--model-name", "trivial", "--speedup-ratio", "1000000", *common]
        async with (
            _process([python, "-m", "dynamo.frontend", "--http-port", str(port), *common], environ),
            _process([python, "-m", "dynamo.mocker", *mocker], environ),
        ):
            url = f"http://127.0.0.1:{port}"
            await _until(url + "/v1/models", word="trivial")
            yield url


@contextlib.asynccontextmanager
async def _process(argv: Sequence[str], environ: dict[str, str] | None = None) -> AsyncIterator[None]:
    quiet = asyncio.subprocess.DEVNULL
    with tempfile.TemporaryDirectory() as folder:  # not ours: Python would find our packages before its own
        process = await asyncio.create_subprocess_exec(
            *argv, stdout=quiet, stderr=quiet, env=_plain(environ), cwd=folder
        )
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _plain(environ: dict[str, str] | None) -> dict[str, str]:
    return {name: value for name, value in (environ or dict(os.environ)).items() if name != "PYTHONPATH"}


async def _until(url: str, word: str = "") -> None:
    """Wait until `url` answers 200 with `word` in it."""
    async with asyncio.timeout(_START_S), aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url) as response:
                    if response.status == 200 and word in await response.text():
                        return
            await asyncio.sleep(0.1)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
