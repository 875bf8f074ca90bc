"""The stack's life with stubs in place of worker and router: order, what children are told, and every way to end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import wait_gone
from tollbridge.cli.display import PlainDisplay
from tollbridge.cli.stack import Deadlines, Stack, check_startable, child_environ, running_stack
from tollbridge.config.cluster import ClusterConfig, RouterConfig, SecretConfig, WorkerConfig
from tollbridge.errors import ConfigError, StartupError
from tollbridge.worker.supervisor import ChildError

SECRET = b"a secret of the stack's tests"
ROOT = Path(__file__).parents[2]
STUB = (sys.executable, str(Path(__file__).with_name("stub.py")))
CLUSTER = ClusterConfig(
    router=RouterConfig(port=0),
    workers=[WorkerConfig(name="p0", prefer="prefill"), WorkerConfig(name="d0", prefer="decode")],
    secret=SecretConfig(env="MY_SECRET"),
)


@pytest.fixture(autouse=True)
def stub_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STUB_FOLDER", str(tmp_path))
    return tmp_path


def stub_stack(cluster: ClusterConfig = CLUSTER) -> AbstractAsyncContextManager[Stack]:
    return running_stack(cluster, SECRET, display=PlainDisplay(), command=STUB)


def given(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text())


async def test_workers_come_first_and_the_router_learns_their_addresses(stub_folder: Path) -> None:
    async with stub_stack() as stack:
        assert stack.url == "http://127.0.0.1:10006"
        assert stack.model == "stub"
        assert all(child.is_ready for child in stack.statistics().values())
        assert [worker.kv for worker in stack.cluster.workers] == ["127.0.0.1:20112", "127.0.0.1:20100"]
    told = [worker["url"] for worker in given(stub_folder, "router")["cluster"]["workers"]]
    assert told == ["http://127.0.0.1:10002"] * 2
    assert given(stub_folder, "p0")["cluster"]["workers"][0]["url"] == "http://127.0.0.1:0"


async def test_nothing_is_left(stub_folder: Path) -> None:
    async with stub_stack() as stack:
        pids = [child.pid for child in stack.statistics().values()]
    for pid in pids:
        wait_gone(pid)
    assert [child.returncode for child in stack.statistics().values()] == [0, 0, 0]
    assert not Path(given(stub_folder, "router")["folder"]).exists()


async def test_the_secret_travels_in_the_environment_only(stub_folder: Path) -> None:
    async with stub_stack():
        pass
    for name in ("p0", "d0", "router"):
        told = given(stub_folder, name)
        assert told["environ"]["TOLLBRIDGE_SECRET"] == SECRET.decode()
        assert told["cluster"].get("secret", {}).get("env", "TOLLBRIDGE_SECRET") == "TOLLBRIDGE_SECRET"
        assert SECRET.decode() not in json.dumps([told["argv"], told["cluster"]])
        assert told["modes"] == ["0o600", "0o700"]


def test_settings_of_the_parent_do_not_override_the_resolved_file() -> None:
    environ = {"TOLLBRIDGE_ROUTER_PORT": "1", "TOLLBRIDGE_HOME": "/h", "PATH": "/bin"}
    told = child_environ(environ, SECRET)
    assert "TOLLBRIDGE_ROUTER_PORT" not in told
    assert (told["TOLLBRIDGE_HOME"], told["PATH"]) == ("/h", "/bin")


@pytest.mark.parametrize("name", ["p0", "d0", "router"])
async def test_a_child_that_cannot_start_ends_everything(
    name: str, stub_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_FAIL", f"{name}=3")
    with pytest.raises(StartupError) as caught:
        async with stub_stack():
            pytest.fail("it is not ready")
    assert caught.value.message == f"{name} ended with exit code 3; it last said: {name} cannot start"
    assert not Path(given(stub_folder, name)["folder"]).exists()


async def test_a_worker_that_dies_while_the_router_starts_is_the_one_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_DIE", "d0=9")
    monkeypatch.setenv("STUB_HANG", "router")  # it kills d0 instead of becoming ready
    with pytest.raises(ChildError, match=r"^d0 ended with exit code 9"):
        await asyncio.wait_for(_enter(stub_stack()), 120)


async def test_a_death_later_is_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_DIE", "p0=7")
    async with stub_stack() as stack:
        os.kill(stack.statistics()["p0"].pid, signal.SIGUSR1)
        error = await asyncio.wait_for(stack.wait_death(), 120)
    assert error.message.startswith("p0 ended with exit code 7")
    assert error.exit_code == 1


async def test_a_child_that_is_never_ready() -> None:
    command = (sys.executable, "-c", "import signal; signal.pause()")
    deadlines = Deadlines(worker_ready_s=0.01)
    with pytest.raises(ChildError, match="was not ready after"):
        async with running_stack(CLUSTER, SECRET, display=PlainDisplay(), command=command, deadlines=deadlines):
            pytest.fail("it is not ready")


async def test_cancelling_the_start_leaves_nothing(stub_folder: Path) -> None:
    task = asyncio.create_task(_enter(stub_stack()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_kill_makes_a_slow_stop_short() -> None:
    async with stub_stack() as stack:
        stack.kill()
    assert {child.returncode for child in stack.statistics().values()} == {-signal.SIGKILL}


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_kill_9_of_the_parent_leaves_nothing(stub_folder: Path) -> None:
    argv = [sys.executable, "-m", "tests.cli.test_stack"]
    environ = {**os.environ, "TMPDIR": str(stub_folder)}  # nobody is left to remove the stack's private folder
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, env=environ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        parent.kill()
    for name in ("p0", "d0", "router"):
        wait_gone(given(stub_folder, name)["pid"])


@pytest.mark.parametrize(
    ("worker", "sentence"),
    [
        (WorkerConfig(name="v", engine="vllm"), "`up` starts embedded workers only"),
        (WorkerConfig(name="far", url="http://node-b:1"), "run `tollbridge worker --name far` on that machine"),
    ],
)
def test_workers_that_up_cannot_start(worker: WorkerConfig, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_startable(ClusterConfig(workers=[worker]))


def test_a_policy_that_the_router_would_refuse() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'split'"):
        check_startable(ClusterConfig(router=RouterConfig(policy="splitt")))


async def _enter(stack: AbstractAsyncContextManager[Stack]) -> None:
    async with stack:
        pass


async def _stay_up() -> None:
    async with stub_stack():
        print("up", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":  # the parent of test_kill_9_of_the_parent_leaves_nothing
    asyncio.run(_stay_up())
