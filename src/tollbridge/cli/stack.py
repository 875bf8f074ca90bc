"""A whole cluster on this machine: workers first, then the router with their real addresses, and nothing left behind.

The children read one resolved cluster file in a private folder; the secret reaches them in the environment only.
While it starts, a stack lives and dies as one: when any child ends, everybody stops. Later `keep.Keeper` starts again
who ends: every address has been chosen by then, and stays.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tollbridge.cli.display import Display
from tollbridge.config.address import is_loopback, parse_address
from tollbridge.config.cluster import ClusterConfig, DiscoveryConfig, SecretConfig, WorkerConfig
from tollbridge.config.load import variables
from tollbridge.config.show import dump
from tollbridge.errors import ConfigError, TollbridgeError
from tollbridge.policy import registry
from tollbridge.wire.ready import Ready
from tollbridge.worker.supervisor import ManagedProcess, OnLine, ProcessSpec, ProcessStatistics

SECRET_VARIABLE = "TOLLBRIDGE_SECRET"  # noqa: S105 (a name, not a secret)
ROUTER = "router"  # the name of that child
COMMAND = (sys.executable, "-m", "tollbridge.cli.main")


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """How long to wait for children, in seconds."""

    worker_ready_s: float = 300.0  # a cold disk reads a model slowly
    router_ready_s: float = 60.0
    drain_s: float = 35.0  # a router lets running requests finish, see Limits.drain_s
    stop_s: float = 10.0


class Stack:
    """The running processes. Made by `running_stack`, which also stops it."""

    def __init__(
        self,
        cluster: ClusterConfig,
        *,
        environ: Mapping[str, str],
        folder: Path,
        command: tuple[str, ...],
        deadlines: Deadlines,
        display: Display,
        on_line: OnLine | None,
    ) -> None:
        self.cluster = cluster  # addresses are filled in as workers become ready
        self.url = ""  # of the router
        self.model = cluster.model  # the name that requests use
        self._environ = environ
        self._folder = folder
        self._command = command
        self._deadlines = deadlines
        self._display = display
        self._on_line = on_line
        self._processes: dict[str, ManagedProcess] = {}

    @property
    def names(self) -> list[str]:
        """The children, the router last."""
        return [*(worker.name for worker in self.cluster.workers), ROUTER]

    def statistics(self) -> dict[str, ProcessStatistics]:
        return {name: process.statistics() for name, process in self._processes.items()}

    async def start(self) -> None:
        """Start everything and return once all are ready; the error of the first child that fails otherwise."""
        path = self._write_cluster("workers.yaml")
        for worker in self.cluster.workers:
            await self._begin(worker.name, path)
        names = [worker.name for worker in self.cluster.workers]
        ready = await self._unless_one_dies(self._all_ready(names, self._deadlines.worker_ready_s))
        workers = [_at(worker, line) for worker, line in zip(self.cluster.workers, ready, strict=True)]
        self.cluster = msgspec.structs.replace(self.cluster, workers=workers, discovery=DiscoveryConfig())
        self.model = ready[0].model or self.model
        await self._begin(ROUTER, self._write_cluster("cluster.yaml"))
        (line,) = await self._unless_one_dies(self._all_ready([ROUTER], self._deadlines.router_ready_s))
        self.url = line.url
        router = msgspec.structs.replace(self.cluster.router, port=urlsplit(line.url).port or 0)
        self.cluster = msgspec.structs.replace(self.cluster, router=router)

    async def restart(self, name: str) -> None:
        """Start a child that has ended again, where it was; the error that says why it is not ready otherwise."""
        await self._spawn(name, self._write_cluster("cluster.yaml"))
        deadlines = self._deadlines
        try:
            await self._processes[name].wait_ready(
                deadlines.router_ready_s if name == ROUTER else deadlines.worker_ready_s
            )
        except TollbridgeError:
            await self._processes[name].stop(deadlines.stop_s)
            raise

    async def wait_end(self, name: str) -> TollbridgeError:
        """Wait until the child called `name` has ended; return the error that says how."""
        process = self._processes[name]
        await process.wait()
        return process.death()

    async def wait_death(self) -> TollbridgeError:
        """Wait until any child ends by itself; return the error that names it."""
        waits = {asyncio.create_task(process.wait()): process for process in self._processes.values()}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        return waits[done.pop()].death()

    async def stop(self) -> None:
        """Stop the router, then the workers, each within the deadline; then nothing of them is left."""
        router = self._processes.get(ROUTER)
        if router:
            await router.stop(self._deadlines.drain_s)
        await asyncio.gather(*(process.stop(self._deadlines.stop_s) for process in self._processes.values()))

    def kill(self) -> None:
        """End every child at once; `stop` still has to be called, and then returns soon."""
        for process in self._processes.values():
            process.kill()

    async def _begin(self, name: str, path: Path) -> None:
        cores = self._cores(name)
        self._display.begin(name, f"starting{f' on core {_join(cores)}' if cores else ''}")
        await self._spawn(name, path)

    async def _spawn(self, name: str, path: Path) -> None:
        role = ("router",) if name == ROUTER else ("worker", "--name", name)
        argv = (*self._command, *role, "--config", str(path))
        spec = ProcessSpec(name=name, argv=argv, environ=self._environ, cores=self._cores(name))
        self._processes[name] = await ManagedProcess.start(spec, on_line=self._on_line)

    def _cores(self, name: str) -> list[int] | None:
        return next((worker.cores for worker in self.cluster.workers if worker.name == name), None)

    async def _all_ready(self, names: list[str], timeout_s: float) -> list[Ready]:
        try:
            async with asyncio.TaskGroup() as waits:
                tasks = [waits.create_task(self._one_ready(name, timeout_s)) for name in names]
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # one cause is enough: the others are its consequence
        return [task.result() for task in tasks]

    async def _one_ready(self, name: str, timeout_s: float) -> Ready:
        ready = await self._processes[name].wait_ready(timeout_s)
        self._display.end(name, f"ready at {ready.url}")
        return ready

    async def _unless_one_dies(self, work: Coroutine[Any, Any, list[Ready]]) -> list[Ready]:
        """Return the result of `work`, or raise the error of a child that died meanwhile."""
        task = asyncio.create_task(work)
        death = asyncio.create_task(self.wait_death())
        try:
            either: list[asyncio.Future[Any]] = [task, death]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise death.result()
            return task.result()
        finally:
            task.cancel()
            death.cancel()
            await asyncio.gather(task, death, return_exceptions=True)

    def _write_cluster(self, name: str) -> Path:
        path = self._folder / name
        dump(msgspec.structs.replace(self.cluster, secret=SecretConfig(env=SECRET_VARIABLE)), path)
        return path


@asynccontextmanager
async def running_stack(
    cluster: ClusterConfig,
    secret: bytes,
    *,
    display: Display,
    on_line: OnLine | None = None,
    on_made: Callable[[Stack], None] = lambda stack: None,
    command: tuple[str, ...] = COMMAND,
    deadlines: Deadlines = Deadlines(),
) -> AsyncIterator[Stack]:
    """Run `cluster` on this machine for as long as the block lasts; every process is gone when it ends.

    `on_made` is called before anything starts, for whoever may have to `kill` the stack.
    """
    check_startable(cluster)
    folder = Path(tempfile.mkdtemp(prefix="tollbridge-"))  # readable by this user only
    stack = Stack(
        cluster,
        environ=child_environ(os.environ, secret),
        folder=folder,
        command=command,
        deadlines=deadlines,
        display=display,
        on_line=on_line,
    )
    on_made(stack)
    try:
        await stack.start()
        yield stack
    finally:
        try:
            await stack.stop()
        finally:
            with suppress(OSError):
                shutil.rmtree(folder)


def check_startable(cluster: ClusterConfig) -> None:
    """Raise ConfigError for a worker that this machine cannot start, or a policy that the router would refuse."""
    registry.find(cluster.router.policy)  # now, not after the workers have loaded the model
    for index, worker in enumerate(cluster.workers):
        if worker.engine != "embedded":
            raise ConfigError(f"workers[{index}].engine is {worker.engine}: `up` starts embedded workers only.")
        if not is_loopback(parse_address(worker.url, scheme="http://").host):
            raise ConfigError(
                f"workers[{index}].url is {worker.url}, but `up` starts workers on loopback: run "
                f"`tollbridge worker --name {worker.name}` on that machine, and `tollbridge router` here."
            )


def child_environ(environ: Mapping[str, str], secret: bytes) -> dict[str, str]:
    """Return the children's environment: the secret, and no setting that would override the resolved cluster file."""
    settings = variables()
    kept = {name: value for name, value in environ.items() if name not in settings}
    return {**kept, SECRET_VARIABLE: secret.decode(), "PYTHONUNBUFFERED": "1"}


def _at(worker: WorkerConfig, ready: Ready) -> WorkerConfig:
    return msgspec.structs.replace(
        worker, url=ready.url, kv=ready.kv or worker.kv, events=ready.events or worker.events
    )


def _join(cores: list[int]) -> str:
    return ", ".join(map(str, cores))
