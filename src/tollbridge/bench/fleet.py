"""A stack for a benchmark: worker and router processes on chosen cores, as `tollbridge up` starts them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import yaml

from tollbridge.errors import TollbridgeError
from tollbridge.wire.ready import Ready
from tollbridge.worker.supervisor import ManagedProcess, ProcessSpec

START_TIMEOUT_S, STOP_GRACE_S = 180.0, 10.0
VLLM_START_TIMEOUT_S, VLLM_STOP_GRACE_S = 900.0, 45.0  # its worker gives vLLM 30 s to end

_DASHES = "--"
_TOLD = "tollbridge: "  # begins the last line of a command of ours that failed
_MAX_QUOTED = 160  # characters of a line of its log
_COMMAND = "command"  # of a worker that is not embedded: what comes after `tollbridge`


def command_of(worker: Mapping[str, object]) -> list[str]:
    """Return the arguments that start a worker: its own, or those of an embedded one."""
    own = worker.get(_COMMAND)
    return [str(each) for each in own] if isinstance(own, list) else ["worker", "--name", str(worker["name"])]


class Fleet:
    """Where each process listens, by name."""

    def __init__(self) -> None:
        self.ready: dict[str, Ready] = {}

    def url(self, name: str) -> str:
        return self.ready[name].url

    @property
    def workers(self) -> list[str]:
        return [name for name, ready in self.ready.items() if ready.ready == "worker"]


@contextlib.asynccontextmanager
async def running(
    *,
    model: str,
    workers: Sequence[dict[str, object]],
    router_cores: Sequence[int] | None,
    engine: dict[str, object],
    more: Mapping[str, object] | None = None,
    prefixes: Mapping[str, Sequence[str]] | None = None,
) -> AsyncIterator[Fleet]:
    """Start `workers` (as the cluster file writes them) and a router over them; stop everything at the end.

    `more` are other keys of the cluster file; `prefixes` go before the command of a process, by its name.
    """
    fleet = Fleet()
    slow = any(worker.get("engine") == "vllm" for worker in workers)
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environ = {**os.environ, "TOLLBRIDGE_SECRET": secrets.token_hex(16)}

        def write(name: str, entries: Sequence[dict[str, object]]) -> str:
            path = folder / f"{name}.yaml"
            base = {
                "model": model,
                "router": {"port": 0, "policy": "local"},
                "workers": list(entries),
                "engine": engine,
            }
            path.write_text(yaml.safe_dump({**base, **(more or {})}))
            return str(path)

        async def start(name: str, config: str, argv: Sequence[str], cores: Sequence[int] | None) -> ManagedProcess:
            command = [*(prefixes or {}).get(name, ()), sys.executable, "-m", "tollbridge.cli.main", *argv]
            if _DASHES not in argv:  # vLLM's worker takes all from its flags
                command += ["--config", config]
            spec = ProcessSpec(name=name, argv=command, environ=environ, cores=cores)
            process = await ManagedProcess.start(spec)
            stack.push_async_callback(process.stop, VLLM_STOP_GRACE_S if slow else STOP_GRACE_S)
            return process

        entries = [{key: value for key, value in worker.items() if key != _COMMAND} for worker in workers]
        bare = write("workers", entries)
        processes = {}
        for worker in workers:  # all at once: each spends most of its start reading
            name, cores = str(worker["name"]), worker.get("cores")
            argv = command_of(worker)
            processes[name] = await start(name, bare, argv, cores if isinstance(cores, list) else None)
        timeout_s = VLLM_START_TIMEOUT_S if slow else START_TIMEOUT_S
        lines = await asyncio.gather(*(_ready(process, timeout_s) for process in processes.values()))
        fleet.ready |= dict(zip(processes, lines, strict=True))
        placed = [{**w, "url": (r := fleet.ready[str(w["name"])]).url, "kv": r.kv, "events": r.events} for w in entries]
        router = await start("router", write("router", placed), ["router"], router_cores)
        fleet.ready["router"] = await _ready(router, START_TIMEOUT_S)
        yield fleet


async def _ready(process: ManagedProcess, timeout_s: float) -> Ready:
    """Wait for the ready line; the error of a process that ends says its own reason first, then the log before it."""
    try:
        return await process.wait_ready(timeout_s)
    except TollbridgeError as error:
        *before, last = process.tail() or [""]
        if not last.startswith(_TOLD):
            raise
        ends = f"; its log ends: {' | '.join(line[:_MAX_QUOTED] for line in before)}" if before else ""
        raise type(error)(f"{process.spec.name}: {last.removeprefix(_TOLD).rstrip('.')}{ends}") from None
