"""The supervisor against children that behave, misbehave and multiply. Each child is a small Python script."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.processes import wait_gone
from tollbridge.errors import StartupError
from tollbridge.worker.supervisor import (
    MAX_LINE_BYTES,
    MAX_LINES,
    ChildError,
    ManagedProcess,
    ProcessSpec,
    maybe_ready,
)

READY = """
import json, os, signal, subprocess, sys
def ready(**more):
    line = {"ready": "worker", "name": "w", "url": "http://127.0.0.1:1", "pid": os.getpid(), **more}
    print(json.dumps(line), flush=True)
"""
LONG_S = 60.0  # a deadline that no test should reach

Start = Callable[..., Awaitable[ManagedProcess]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Start a child that runs `script`; it is stopped at the end of the test, whatever happened."""
    children: list[ManagedProcess] = []

    async def start_child(script: str, *, cores: list[int] | None = None, on_line=None) -> ManagedProcess:  # type: ignore[no-untyped-def]
        argv = [sys.executable, "-u", "-c", READY + script]
        child = await ManagedProcess.start(
            ProcessSpec(name="w", argv=argv, environ=os.environ, cores=cores), on_line=on_line
        )
        children.append(child)
        return child

    yield start_child
    for child in children:
        await child.stop(grace_s=0)


async def test_ready(start: Start) -> None:
    child = await start("print('loading'); ready(kv='127.0.0.1:7801'); signal.pause()")
    ready = await child.wait_ready(LONG_S)
    assert (ready.name, ready.pid, ready.kv) == ("w", child.pid, "127.0.0.1:7801")
    assert child.statistics().is_ready
    assert child.returncode is None
    assert child.tail() == ["loading"]


async def test_stop_asks_first(start: Start) -> None:
    script = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('bye') or 7)); ready(); signal.pause()"
    child = await start(script)
    await child.wait_ready(LONG_S)
    assert await child.stop(LONG_S) == 7
    assert child.tail() == ["bye"]
    assert await child.stop(LONG_S) == 7


async def test_stop_insists_on_a_child_that_ignores_sigterm(start: Start) -> None:
    child = await start("signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); [signal.pause() for _ in range(9)]")
    await child.wait_ready(LONG_S)
    assert await child.stop(grace_s=0.05) == -signal.SIGKILL
    assert child.death().message.startswith("w was ended by signal 9 (Killed)")


async def test_never_ready(start: Start) -> None:
    child = await start("print('hm', file=sys.stderr); signal.pause()")
    with pytest.raises(ChildError, match=r"^w was not ready after 0 s"):
        await child.wait_ready(0.01)


async def test_an_early_death_is_told_with_the_last_lines(start: Start) -> None:
    child = await start("[print(i, file=sys.stderr) for i in range(9)]; sys.exit(1)")
    with pytest.raises(ChildError) as caught:
        await child.wait_ready(LONG_S)
    assert caught.value.message == "w ended with exit code 1; it last said: 4 | 5 | 6 | 7 | 8"
    assert caught.value.exit_code == 1


async def test_exit_code_three_is_a_start_up_error(start: Start) -> None:
    child = await start("sys.exit(3)")
    with pytest.raises(StartupError, match="ended with exit code 3, and it said nothing"):
        await child.wait_ready(LONG_S)


async def test_ready_and_gone_at_once_still_counts_as_ready(start: Start) -> None:
    child = await start("ready()")
    await child.wait()
    assert (await child.wait_ready(LONG_S)).name == "w"


async def test_no_such_program() -> None:
    with pytest.raises(StartupError, match=r"w cannot be started: /none: No such file"):
        await ManagedProcess.start(ProcessSpec(name="w", argv=["/none"], environ={}))


async def test_a_chatty_child_is_drained_and_its_lines_are_bounded(start: Start) -> None:
    seen: list[tuple[str, str]] = []
    script = f"print('x' * {300_000}); [print(i) for i in range({MAX_LINES + 50})]; ready(); signal.pause()"
    child = await start(script, on_line=lambda name, line: seen.append((name, line)))
    await child.wait_ready(LONG_S)
    assert len(child.tail(10_000)) == MAX_LINES
    assert child.tail(1) == [str(MAX_LINES + 49)]
    assert len(seen) == MAX_LINES + 51
    assert seen[0] == ("w", "x" * MAX_LINE_BYTES)


async def test_a_grandchild_that_is_left_behind_is_killed(start: Start) -> None:
    child = await start(
        "sub = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()']); print(sub.pid); ready()"
    )
    await child.wait_ready(LONG_S)
    grandchild = int(child.tail(1)[0])
    assert await child.wait() == 0
    wait_gone(grandchild)


async def test_cancelling_stop_still_kills(start: Start) -> None:
    child = await start("signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); [signal.pause() for _ in range(9)]")
    await child.wait_ready(LONG_S)
    stopping = asyncio.create_task(child.stop(LONG_S))
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert await child.wait() == -signal.SIGKILL


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux pins processes to cores")
async def test_pinned_to_cores(start: Start) -> None:
    core = max(os.sched_getaffinity(0))
    child = await start("print(sorted(os.sched_getaffinity(0))); ready()", cores=[core])
    await child.wait_ready(LONG_S)
    assert child.tail(1) == [f"[{core}]"]


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_kill_9_of_the_supervisor_ends_the_child() -> None:
    script = """
import asyncio, os, sys
from tollbridge.worker.supervisor import ManagedProcess, ProcessSpec
async def main():
    argv = [sys.executable, "-c", "import signal; signal.pause()"]
    child = await ManagedProcess.start(ProcessSpec(name="w", argv=argv, environ=os.environ))
    print(child.pid, flush=True)
    await child.wait()
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        child_pid = int(supervisor.stdout.readline())
        supervisor.kill()
    wait_gone(child_pid)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_kill_9_of_the_supervisor_lets_a_child_end_its_own_children(tmp_path: Path) -> None:
    child = f"""
import pathlib
def end():
    pathlib.Path({str(tmp_path / "asked")!r}).touch()
    os._exit(0)
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM}})
ready()
signal.sigwait({{signal.SIGTERM}})
end()
"""
    script = f"""
import asyncio, os, signal, sys
from tollbridge.worker.supervisor import ManagedProcess, ProcessSpec
async def main():
    argv = [sys.executable, "-c", {READY + child!r}]
    spec = ProcessSpec(name="w", argv=argv, environ=os.environ, orphaned=signal.SIGTERM)
    child = await ManagedProcess.start(spec)
    await child.wait_ready({LONG_S})
    print(child.pid, flush=True)
    await child.wait()
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        child_pid = int(supervisor.stdout.readline())
        supervisor.kill()
    wait_gone(child_pid)
    assert (tmp_path / "asked").exists()


@pytest.mark.parametrize("line", ["", "hello", "{", "{}", '{"ready": "cook"}', '{"ready": "worker", "name": "w"}'])
def test_what_is_no_ready_line(line: str) -> None:
    assert maybe_ready(line) is None
