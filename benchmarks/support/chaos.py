"""A fleet that is ill-treated: embedded workers with the tiny model behind one router, and what can be done to them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import yaml

from benchmarks.support.links import Link, linked
from benchmarks.support.zygote import Zygote
from tollbridge.worker.supervisor import ManagedProcess, ProcessSpec

ROLES = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode", "d2": "decode"}
_START_S = 120.0


@dataclass
class Victim:
    """One worker of the fleet."""

    name: str
    url: str
    pid: int = 0
    busy: bool = False  # a fault is at work
    generation: int = 0


@dataclass
class Fleet:
    zygote: Zygote
    session: aiohttp.ClientSession
    folder: Path
    config: Path
    router: ManagedProcess | None = None
    url: str = ""
    victims: dict[str, Victim] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)
    recoveries_s: list[float] = field(default_factory=list)

    def start(self, victim: Victim) -> None:
        victim.generation += 1
        victim.pid = self.zygote.start(victim.name, self.config, self.folder / f"{victim.name}.log")

    async def kill(self, victim: Victim, pause_s: float) -> None:
        """Kill it, start it again after `pause_s`, and note how soon the router uses it once it serves."""
        self.zygote.kill(victim.pid)
        await asyncio.sleep(pause_s)
        self.start(victim)
        await self.until_healthy(victim)
        await self.note_recovery(victim)

    async def stop(self, victim: Victim, seconds: float) -> None:
        """Freeze it for a while."""
        os.kill(victim.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            os.kill(victim.pid, signal.SIGCONT)
        await self.until_healthy(victim)
        await self.note_recovery(victim)

    async def slow(self, victim: Victim, seconds: float) -> None:
        """Let it run a quarter of the time only."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            os.kill(victim.pid, signal.SIGSTOP)
            await asyncio.sleep(0.06)
            os.kill(victim.pid, signal.SIGCONT)
            await asyncio.sleep(0.02)

    async def until_healthy(self, victim: Victim) -> None:
        async with asyncio.timeout(_START_S):
            while True:
                if await self._is_healthy(victim.url):
                    return
                await asyncio.sleep(0.02)

    async def note_recovery(self, victim: Victim) -> None:
        """Wait until the router would send it requests again, and note how long that took."""
        start_s = time.monotonic()
        async with asyncio.timeout(_START_S):
            while True:
                if await self._is_used(victim.name):
                    break
                await asyncio.sleep(0.02)
        self.recoveries_s.append(time.monotonic() - start_s)

    async def _is_healthy(self, url: str) -> bool:
        try:
            async with self.session.get(url + "/health", timeout=aiohttp.ClientTimeout(total=1)) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def _is_used(self, name: str) -> bool:
        async with self.session.get(self.url + "/health") as response:
            said = (await response.json())["workers"][name]
        return bool(said["ready"] and not said["suspect"])


@contextlib.asynccontextmanager
async def ill_treated(model: Path) -> AsyncIterator[Fleet]:
    """Run the fleet; everything is gone at the end."""
    secret = secrets.token_hex(16)
    environ = {**os.environ, "TOLLBRIDGE_SECRET": secret}
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        zygote = stack.enter_context(Zygote(environ))
        fleet = Fleet(zygote, session, folder, folder / "workers.yaml")
        placed = await _place(fleet, stack)
        _write(fleet.config, model, [one["own"] for one in placed])
        _write(folder / "router.yaml", model, [one["seen"] for one in placed])
        for victim in fleet.victims.values():
            fleet.start(victim)
        for victim in fleet.victims.values():
            await fleet.until_healthy(victim)
        argv = [sys.executable, "-m", "tollbridge.cli.main", "router", "--config", str(folder / "router.yaml")]
        fleet.router = await ManagedProcess.start(ProcessSpec(name="router", argv=argv, environ=environ, cores=None))
        stack.push_async_callback(fleet.router.stop)
        fleet.url = (await fleet.router.wait_ready(_START_S)).url
        yield fleet


async def _place(fleet: Fleet, stack: contextlib.AsyncExitStack) -> list[dict[str, dict[str, object]]]:
    """Choose ports that a restarted worker has again, and put a link in front of each KV port."""
    placed: list[dict[str, dict[str, object]]] = []
    ports = iter(_free_ports(2 * len(ROLES)))
    for name, prefer in ROLES.items():
        http, kv = next(ports), next(ports)
        own: dict[str, object] = {
            "name": name, "prefer": prefer, "url": f"http://127.0.0.1:{http}", "kv": f"127.0.0.1:{kv}", "events": None,
        }  # fmt: skip
        link = await stack.enter_async_context(linked(("127.0.0.1", kv)))
        fleet.links[name] = link
        fleet.victims[name] = Victim(name, str(own["url"]))
        placed.append({"own": own, "seen": {**own, "kv": f"{link.address[0]}:{link.address[1]}"}})
    return placed


def _write(path: Path, model: Path, workers: list[dict[str, object]]) -> None:
    engine = {"kv_cache_mib": 16, "threads": 1, "max_num_batched_tokens": 64}
    cluster = {
        "model": str(model),
        "dtype": "float32",
        "router": {"port": 0, "policy": "local"},
        "workers": workers,
        "engine": engine,
    }
    path.write_text(yaml.safe_dump(cluster))


def _free_ports(number: int) -> list[int]:
    """Return different ports that nobody uses now; a worker that is restarted must find its own again, so not 0."""
    with contextlib.ExitStack() as held:
        listeners = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [int(listener.getsockname()[1]) for listener in listeners]
