"""`tollbridge router` as a process: what it says, and where."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import aiohttp
import msgspec

from tests.support.stub_worker import SECRET, StubWorker, stubs
from tollbridge.config.cluster import ClusterConfig, RouterConfig
from tollbridge.config.show import dump
from tollbridge.wire.ready import Ready


async def test_one_log_line_per_request_on_stderr(tmp_path: Path) -> None:
    async with stubs(worker := StubWorker("w0")):
        dump(ClusterConfig(router=RouterConfig(port=0), workers=[worker.config]), tmp_path / "cluster.yaml")
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tollbridge", "router", "--config", str(tmp_path / "cluster.yaml"),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "TOLLBRIDGE_SECRET": SECRET.decode()},
        )  # fmt: skip
        assert child.stdout is not None
        try:
            async with asyncio.timeout(20):
                ready = msgspec.json.decode(await child.stdout.readline(), type=Ready)
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{ready.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}) as answer,
            ):
                assert answer.status == 200
        finally:
            child.terminate()
            out, err = await child.communicate()
    assert out == b""
    lines = [line for line in err.decode().splitlines() if " INFO tollbridge.router request id=" in line]
    assert len(lines) == 1
    assert "choice=local" in lines[0]
    assert "status=ok" in lines[0]
