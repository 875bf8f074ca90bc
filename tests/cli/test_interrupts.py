"""The first signal cancels and is cleaned up after; the second is passed on; the exit code says which it was."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tollbridge.cli.interrupts import Interrupts, run_interruptible


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)])
async def test_a_signal_cancels_once_and_waits_for_the_cleaning_up(number: signal.Signals, code: int) -> None:
    cleaned = []

    async def work(interrupts: Interrupts) -> int:
        again = asyncio.Event()
        interrupts.on_second = again.set
        try:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
        finally:
            os.kill(os.getpid(), number)
            await asyncio.wait_for(again.wait(), 120)
            cleaned.append(True)
        return 5

    assert await run_interruptible(work) == code
    assert cleaned == [True]


async def test_work_that_ends_by_itself_has_its_own_exit_code() -> None:
    async def work(interrupts: Interrupts) -> int:
        return 5

    assert await run_interruptible(work) == 5


async def test_somebody_elses_cancel_is_not_swallowed() -> None:
    async def work(interrupts: Interrupts) -> int:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await run_interruptible(work)
