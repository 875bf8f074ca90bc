"""Trivial upstreams with a router in front of them, as processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import yaml

from tollbridge.worker.supervisor import ManagedProcess, ProcessSpec

ROOT = Path(__file__).parents[2]
BODY = b'{"model": "trivial", "prompt": "What is a toll?", "max_tokens": 16, "temperature": 0}'
STREAM_BODY = BODY[:-1] + b', "stream": true}'


@contextlib.asynccontextmanager
async def trivial(
    num_events: int = 16, *, core: int | None = None, module: str = "benchmarks.support.trivial"
) -> AsyncIterator[str]:
    """Run one upstream, on `core` where one is given, and yield its URL."""
    pin = ["taskset", "-c", str(core)] if core is not None else []
    process = await asyncio.create_subprocess_exec(
        *pin, sys.executable, "-m", module, str(num_events), stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def router_over(urls: list[str], **router: object) -> AsyncIterator[tuple[str, int]]:
    """Run our router over workers at `urls`; yield its URL and process id."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "router.yaml"
        workers = [{"name": f"w{at}", "url": url, "events": None} for at, url in enumerate(urls)]
        path.write_text(
            yaml.safe_dump({"model": "trivial", "router": {"port": 0, "policy": "local", **router}, "workers": workers})
        )
        environ = {**os.environ, "TOLLBRIDGE_SECRET": secrets.token_hex(16)}
        argv = [sys.executable, "-m", "tollbridge.cli.main", "router", "--config", str(path)]
        process = await ManagedProcess.start(ProcessSpec(name="router", argv=argv, environ=environ, cores=None))
        try:
            ready = await process.wait_ready(60.0)
            yield ready.url, ready.pid
        finally:
            await process.stop()
