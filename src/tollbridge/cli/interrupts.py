"""Ctrl-C, SIGTERM and SIGHUP end a running command once; a second one is impatient."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

EXIT_INTERRUPTED = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Cancels the command's task at the first signal, and calls `on_second` at any later one."""

    def __init__(self, task: asyncio.Task[int]) -> None:
        self.on_second: Callable[[], None] | None = None
        self.first: signal.Signals | None = None
        self._task = task

    def take(self, number: signal.Signals) -> None:
        """Handle one signal; called by the event loop."""
        if self.first is None:
            self.first = number
            self._task.cancel()
        elif self.on_second:
            self.on_second()

    def exit_code(self) -> int:
        """Return 130 for Ctrl-C; 0 for SIGTERM and SIGHUP, for we were asked to stop and did."""
        return EXIT_INTERRUPTED if self.first is signal.SIGINT else 0


async def run_interruptible(work: Callable[[Interrupts], Coroutine[Any, Any, int]]) -> int:
    """Run `work` until it ends or a signal cancels it; return its exit code, or the signal's."""
    task = asyncio.current_task()
    assert task is not None, "called from a coroutine"
    interrupts = Interrupts(task)
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, interrupts.take, number)
    try:
        return await work(interrupts)
    except asyncio.CancelledError:
        if interrupts.first is None:
            raise
        task.uncancel()
        return interrupts.exit_code()
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
