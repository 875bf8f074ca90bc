"""Keeps a stack running: whoever ends without being asked is started again, at the address that the others know.

A worker that cannot be brought back is left out, and said to be; the router serves with the others. The stack ends when
no worker is left, or when the router cannot be brought back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tollbridge.cli.stack import ROUTER, Stack
from tollbridge.clock import Clock, SystemClock
from tollbridge.errors import TollbridgeError
from tollbridge.worker.restarts import RestartPolicy, Restarts

Say = Callable[[str], None]


class Keeper:
    """Owns the restarts of one stack that has started. `run` ends by an error or by cancellation."""

    def __init__(
        self, stack: Stack, say: Say, *, policy: RestartPolicy | None = None, clock: Clock | None = None
    ) -> None:
        self._stack = stack
        self._say = say
        self._clock = clock or SystemClock()
        self._restarts = {name: Restarts(policy or RestartPolicy()) for name in stack.names}

    def statistics(self) -> dict[str, int]:
        """Return how often each child was started again."""
        return {name: restarts.total for name, restarts in self._restarts.items()}

    async def run(self) -> TollbridgeError:
        """Keep everybody running until that is no use any more; return the error that says why."""
        tasks = {asyncio.create_task(self._keep(name)): name for name in self._stack.names}
        workers = {task for task, name in tasks.items() if name != ROUTER}
        try:
            pending = set(tasks)
            while True:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if tasks[task] == ROUTER or not workers & pending:
                        return task.result()
                    self._say(f"{task.result().message} It is not started again; the others serve on.")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, name: str) -> TollbridgeError:
        """Start `name` again whenever it ends; return the error of its last end."""
        restarts, started_s = self._restarts[name], self._clock.monotonic()
        while True:
            error = await self._stack.wait_end(name)
            returncode = self._stack.statistics()[name].returncode
            pause_s = restarts.maybe_pause_s(returncode, started_s, self._clock.monotonic())
            if pause_s is None:
                return error
            self._say(f"{error.message} It is started again in {pause_s:g} s (restart {restarts.total}).")
            await asyncio.sleep(pause_s)
            started_s = self._clock.monotonic()
            try:
                await self._stack.restart(name)
            except TollbridgeError as failure:
                self._say(failure.message)
            else:
                self._say(f"{name} is ready again after {self._clock.monotonic() - started_s:.1f} s.")
