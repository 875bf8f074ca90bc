"""`tollbridge router` as a process: what it says, and where."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import aiohttp
import msgspec
import pytest

from tests.support.stack import Process, tollbridge
from tests.support.stub_worker import SECRET, StubWorker, stubs
from tollbridge.config.cluster import ClusterConfig, RouterConfig
from tollbridge.config.show import dump
from tollbridge.wire.ready import Ready


async def test_one_log_line_per_request_on_stderr(tmp_path: Path) -> None:
    async with stubs(worker := StubWorker("w0")):
        dump(
            ClusterConfig(router=RouterConfig(port=0, policy="local"), workers=[worker.config]),
            tmp_path / "cluster.yaml",
        )
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tollbridge", "router", "--config", str(tmp_path / "cluster.yaml"),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "TOLLBRIDGE_SECRET": SECRET.decode()},
        )  # fmt: skip
        assert child.stdout is not None
        try:
            async with asyncio.timeout(120):
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


@pytest.mark.parametrize(("switch", "status"), [("true", 200), ("false", 404)])
async def test_the_dashboard_can_be_left_out(tmp_path: Path, switch: str, status: int) -> None:
    config = tmp_path / "tollbridge.yaml"
    config.write_text(f"router: {{port: 0, ui: {switch}}}\nworkers: [{{name: w, url: http://127.0.0.1:1}}]\n")
    process = Process(tollbridge("router", "--config", str(config)), tmp_path / "router.log")
    try:
        url = process.wait_ready()["url"]
        async with aiohttp.ClientSession() as session, session.get(f"{url}/ui/") as answer:
            assert answer.status == status
    finally:
        process.stop()
