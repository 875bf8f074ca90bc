"""Who is started again, where, how often, and when it is over; with stubs for children."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_stack import given, stub_folder, stub_stack
from tollbridge.cli.keep import Keeper
from tollbridge.cli.stack import Stack
from tollbridge.errors import TollbridgeError
from tollbridge.worker.restarts import RestartPolicy

__all__ = ["stub_folder"]  # the fixture

QUICK = RestartPolicy(first_pause_s=0.01, longest_pause_s=0.01, max_in_a_row=2)


class Kept:
    """A stack with a keeper. `until` waits for a sentence of its."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.sentences: asyncio.Queue[str] = asyncio.Queue()
        self.keeper = Keeper(stack, self.sentences.put_nowait, policy=QUICK)
        self.end: asyncio.Task[TollbridgeError] = asyncio.create_task(self.keeper.run())

    def pid(self, name: str) -> int:
        return self.stack.statistics()[name].pid

    async def until(self, words: str) -> str:
        async with asyncio.timeout(120):
            while words not in (sentence := await self.sentences.get()):
                pass
        return sentence


@asynccontextmanager
async def kept() -> AsyncIterator[Kept]:
    async with stub_stack() as stack:
        made = Kept(stack)
        try:
            yield made
        finally:
            made.end.cancel()
            await asyncio.gather(made.end, return_exceptions=True)


@pytest.mark.parametrize("name", ["d0", "router"])
async def test_a_killed_child_comes_back_at_its_address(name: str, stub_folder: Path) -> None:
    async with kept() as k:
        first = k.pid(name)
        os.kill(first, signal.SIGKILL)
        assert await k.until("started again") == (
            f"{name} was ended by signal 9 (Killed), and it said nothing. It is started again in 0.01 s (restart 1)."
        )
        await k.until(f"{name} is ready again")
        assert k.pid(name) != first
        assert k.keeper.statistics()[name] == 1
        told: dict[str, Any] = given(stub_folder, name)["cluster"]
        assert told["router"]["port"] == 10006
        assert [worker["url"] for worker in told["workers"]] == ["http://127.0.0.1:10002"] * 2
        assert not k.end.done()


async def test_a_crash_loop_is_bounded_and_the_others_serve_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with kept() as k:
        for _ in range(2):
            os.kill(k.pid("d0"), signal.SIGKILL)
            await k.until("d0 is ready again")
        os.kill(k.pid("d0"), signal.SIGKILL)
        assert "not started again" in await k.until("the others serve on")
        assert not k.end.done()
        monkeypatch.setitem(k.stack._environ, "STUB_FAIL", "p0=3")  # type: ignore[arg-type]
        os.kill(k.pid("p0"), signal.SIGKILL)
        error = await asyncio.wait_for(k.end, 120)
        assert error.message == "p0 ended with exit code 3; it last said: p0 cannot start"
        assert error.exit_code == 3
        assert k.keeper.statistics() == {"p0": 1, "d0": 2, "router": 0}


async def test_without_its_router_a_stack_is_over() -> None:
    async with kept() as k:
        for _ in range(2):
            os.kill(k.pid("router"), signal.SIGKILL)
            await k.until("router is ready again")
        os.kill(k.pid("router"), signal.SIGKILL)
        assert "router was ended by signal 9" in (await asyncio.wait_for(k.end, 120)).message


async def test_whoever_leaves_while_a_child_is_down_leaves_nothing(stub_folder: Path) -> None:
    async with kept() as k:
        os.kill(k.pid("d0"), signal.SIGKILL)
        await k.until("started again")
        folder = Path(json.loads((stub_folder / "router.json").read_text())["folder"])
    assert not folder.exists()
    assert all(child.returncode is not None for child in k.stack.statistics().values())
