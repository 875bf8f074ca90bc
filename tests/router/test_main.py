"""The router as a process: ready line, exit codes, SIGTERM."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest

from tests.support.router_rig import PATIENCE_S, happens
from tests.support.stub_worker import SECRET, Behaviour, StubWorker, stubs
from tollbridge.config.cluster import ClusterConfig, RouterConfig
from tollbridge.errors import ConfigError, StartupError
from tollbridge.router.main import listening, run_router

PROGRAM = """
import sys
import msgspec
from tollbridge.config.cluster import ClusterConfig
from tollbridge.router.limits import Limits
from tollbridge.router.main import run_router
cluster = msgspec.json.decode(sys.argv[1], type=ClusterConfig)
assert "torch" not in sys.modules
sys.exit(run_router(cluster=cluster, secret=sys.argv[2].encode(), limits=Limits(drain_s=float(sys.argv[3]))))
"""


def cluster_of(*workers: StubWorker, **router: object) -> ClusterConfig:
    settings = {"port": 0, **router}
    return ClusterConfig(router=RouterConfig(**settings), workers=[w.config for w in workers])  # type: ignore[arg-type]


@asynccontextmanager
async def process(cluster: ClusterConfig, drain_s: float = PATIENCE_S) -> AsyncIterator[asyncio.subprocess.Process]:
    argv = (msgspec.json.encode(cluster).decode(), SECRET.decode(), str(drain_s))
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-c", PROGRAM, *argv,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def ready_line(child: asyncio.subprocess.Process) -> dict[str, object]:
    assert child.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        return dict(json.loads(await child.stdout.readline()))


async def exit_code(child: asyncio.subprocess.Process) -> int:
    async with asyncio.timeout(PATIENCE_S):
        return await child.wait()


async def test_ready_line_and_clean_stop() -> None:
    worker = StubWorker("w0")
    async with stubs(worker), process(cluster_of(worker)) as child:
        ready = await ready_line(child)
        assert (ready["ready"], ready["pid"]) == ("router", child.pid)
        async with aiohttp.ClientSession() as session, session.get(f"{ready['url']}/health") as answer:
            assert answer.status == 200  # the workers were checked before the line was printed
        child.send_signal(signal.SIGTERM)
        assert await exit_code(child) == 0
        assert child.stderr is not None
        assert await child.stderr.read() == b""


async def test_sigterm_lets_running_requests_finish_and_takes_no_new_ones() -> None:
    worker, gate = StubWorker("w0"), asyncio.Event()
    worker.behaviour["local"] = Behaviour(hold=gate)
    async with stubs(worker), process(cluster_of(worker)) as child, aiohttp.ClientSession() as session:
        url = (await ready_line(child))["url"]
        running = asyncio.create_task(_post(session, str(url)))
        await happens(worker.arrived["local"])
        child.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            while (await _status(session, f"{url}/health")) != 503:
                pass
        async with session.post(f"{url}/v1/completions", json={"prompt": "b"}) as refused:
            assert (refused.status, "shutting down" in await refused.text()) == (503, True)
            assert int(refused.headers["Retry-After"]) >= 1
        assert worker.roles() == ["local"]
        gate.set()
        assert b"[DONE]" in await running
        assert await exit_code(child) == 0


async def test_sigterm_has_a_grace_period() -> None:
    worker = StubWorker("w0")
    worker.behaviour["local"] = Behaviour("hang")
    async with stubs(worker), process(cluster_of(worker), 0.2) as child, aiohttp.ClientSession() as session:
        url = (await ready_line(child))["url"]
        running = asyncio.create_task(_post(session, str(url)))
        await happens(worker.arrived["local"])
        child.send_signal(signal.SIGTERM)
        assert await exit_code(child) == 0
        await happens(worker.departed["local"])
        with pytest.raises(aiohttp.ClientError):
            await running


async def _post(session: aiohttp.ClientSession, url: str) -> bytes:
    async with session.post(f"{url}/v1/completions", json={"prompt": "a", "stream": True}) as answer:
        return await answer.read()


async def _status(session: aiohttp.ClientSession, url: str) -> int:
    async with session.get(url) as answer:
        return answer.status


def test_port_in_use_is_exit_3(capsys: pytest.CaptureFixture[str]) -> None:
    worker = StubWorker("w0")
    worker.url = "http://127.0.0.1:1"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cluster = cluster_of(worker, port=taken.getsockname()[1])
        assert run_router(cluster=cluster, secret=SECRET) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tollbridge router: The router cannot listen on http://127.0.0.1:")
    assert len(err.splitlines()) == 1


def test_unknown_policy_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    worker = StubWorker("w0")
    worker.url = "http://127.0.0.1:1"
    assert run_router(cluster=cluster_of(worker, policy="splitt"), secret=SECRET) == 2
    assert "Did you mean 'split'" in capsys.readouterr().err


async def test_tls_files_are_checked(tmp_path: Path) -> None:
    worker = StubWorker("w0")
    worker.url = "http://127.0.0.1:1"
    with pytest.raises(ConfigError, match="cert and key"):
        async with listening(cluster_of(worker, tls={"cert": "x"}), SECRET):
            pass
    missing = {"cert": str(tmp_path / "none.pem"), "key": str(tmp_path / "none.key")}
    with pytest.raises(StartupError, match=r"none\.pem"):
        async with listening(cluster_of(worker, tls=missing), SECRET):
            pass


def test_importing_the_router_needs_no_torch() -> None:
    code = "import sys, tollbridge.router.main; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
