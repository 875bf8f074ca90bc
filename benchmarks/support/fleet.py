"""A stack for a benchmark: worker and router processes on chosen cores, as `tollbridge up` starts them."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import yaml

from tollbridge.wire.ready import Ready
from tollbridge.worker.supervisor import ManagedProcess, ProcessSpec

START_TIMEOUT_S = 180.0


class Fleet:
    """Where each process listens, by name."""

    def __init__(self) -> None:
        self.ready: dict[str, Ready] = {}

    def url(self, name: str) -> str:
        return self.ready[name].url


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
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environ = {**os.environ, "TOLLBRIDGE_SECRET": secrets.token_hex(16)}

        def write(name: str, entries: Sequence[dict[str, object]]) -> str:
            path = folder / f"{name}.yaml"
            base = {"model": model, "router": {"port": 0}, "workers": list(entries), "engine": engine}
            cluster = {**base, **(more or {})}
            path.write_text(yaml.safe_dump(cluster))
            return str(path)

        async def start(name: str, config: str, argv: Sequence[str], cores: Sequence[int] | None) -> None:
            command = [
                *(prefixes or {}).get(name, ()),
                sys.executable,
                "-m",
                "tollbridge.cli.main",
                *argv,
                "--config",
                config,
            ]
            process = await ManagedProcess.start(ProcessSpec(name=name, argv=command, environ=environ, cores=cores))
            stack.push_async_callback(process.stop)
            fleet.ready[name] = await process.wait_ready(START_TIMEOUT_S)

        bare = write("workers", workers)
        for worker in workers:
            name = str(worker["name"])
            cores = worker.get("cores")
            await start(name, bare, ["worker", "--name", name], cores if isinstance(cores, list) else None)
        placed = [{**w, "url": (r := fleet.ready[str(w["name"])]).url, "kv": r.kv, "events": r.events} for w in workers]
        await start("router", write("router", placed), ["router"], router_cores)
        yield fleet
