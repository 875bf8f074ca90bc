"""`tollbridge deploy render --to local-check`: the rendered workers and router on this machine, and one split."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

import tollbridge
from tollbridge.cli.client import RouterClient
from tollbridge.cli.interrupts import Interrupts, run_interruptible
from tollbridge.config.cluster import ClusterConfig
from tollbridge.deploy import local
from tollbridge.deploy.render.engine import CACHE, HOME, PLUGIN
from tollbridge.deploy.render.everything import render
from tollbridge.deploy.render.router import FILE, dump, settings
from tollbridge.deploy.render.site import SECRET_KEY, Site
from tollbridge.errors import ConfigError, StartupError, TollbridgeError
from tollbridge.vllm.addresses import free_port
from tollbridge.wire.decision import DecisionRecord
from tollbridge.worker.supervisor import ManagedProcess, ProcessSpec

NUM_TOKENS = 400  # of the prompt: several blocks
READY_S = 600.0
STOP_S = 90.0
_POLL_S = 0.5
_INHERITED = ("PATH", "LANG", "LD_LIBRARY_PATH", "TMPDIR", "VIRTUAL_ENV")


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it; the last line of stdout."""

    verified: bool
    choice: str
    why: str
    prompt_tokens: int
    loaded_tokens: int | None
    start_s: float  # until both workers were healthy
    drain_s: dict[str, float]  # of each worker's preStop
    drained: bool  # every preStop ended with 0


def local_check(cluster: ClusterConfig, secret: str, *, run: bool, python: str) -> int:
    """Show the processes, or run them; return 0 when nothing was to be run, or the split was verified."""
    if cluster.deploy.engine != "vllm":
        raise ConfigError("local-check is for deploy.engine vllm; `tollbridge up` runs embedded workers.")
    made = render(cluster, "deployments", secret, force=True)
    with tempfile.TemporaryDirectory(prefix="tollbridge-") as folder:
        workers = local.processes(
            made.objects, free_port=lambda: free_port(local.POD_IP), python=python, folders=_folders(Path(folder))
        )
        path = Path(folder) / FILE
        path.write_text(dump(router_settings(cluster, workers)))
        if not run:
            print("\n\n".join(f"# {each.name}\n{local.shell(each)}" for each in workers))
            print(f"\n# router\ntollbridge router --config {FILE}   # which is:\n{path.read_text()}", end="")
            return 0
        return asyncio.run(run_interruptible(partial(_run, cluster, workers, path, secret)))


def router_settings(cluster: ClusterConfig, workers: list[local.LocalProcess]) -> dict[str, Any]:
    """Return the router's rendered file, with the workers listed in place of discovered."""
    rendered = settings(Site(cluster=cluster, target="deployments"))
    listed = [
        {
            "name": each.name,
            "prefer": each.name,
            "engine": "vllm",
            "connector": cluster.deploy.connector,
            "url": f"http://{local.POD_IP}:{each.ports['http']}",
            "kv": f"{local.POD_IP}:{each.ports.get('kv', 7801)}",
            "events": f"tcp://{local.POD_IP}:{each.ports['events']}",
        }
        for each in workers
    ]
    rendered["router"] |= {"host": local.POD_IP, "port": 0, "allow_override": "loopback"}
    return {**rendered, "discovery": "static", "workers": listed}


def _folders(folder: Path) -> dict[str, str]:
    cache = os.environ.get("HF_HOME", str(Path("~/.cache/huggingface").expanduser()))
    return {CACHE: cache, HOME: str(folder / "home"), PLUGIN: str(Path(tollbridge.__file__).parents[1])}


async def _run(
    cluster: ClusterConfig, workers: list[local.LocalProcess], path: Path, secret: str, interrupts: Interrupts
) -> int:
    begun_s = time.monotonic()
    async with AsyncExitStack() as stack, aiohttp.ClientSession() as session:
        running = [await stack.enter_async_context(_process(each.name, each.argv, each.environ)) for each in workers]
        interrupts.on_second = partial(_kill, running)
        async with asyncio.TaskGroup() as group:
            for worker, process in zip(workers, running, strict=True):
                group.create_task(_until_healthy(session, worker, process))
        start_s = time.monotonic() - begun_s
        argv = [sys.executable, "-m", "tollbridge.cli.main", "router", "--config", str(path)]
        environ = {SECRET_KEY: secret, "PYTHONPATH": str(Path(tollbridge.__file__).parents[1])}
        router = await stack.enter_async_context(_process("router", argv, environ))
        url = (await router.wait_ready(READY_S)).url
        record = await _ask(session, url, cluster)
        took_s, codes = await _drain(workers)
    checked = _checked(record, start_s, took_s, drained=not any(codes))
    print(msgspec.json.encode(checked).decode())
    return 0 if checked.verified and checked.drained else 1


@asynccontextmanager
async def _process(name: str, argv: list[str], environ: dict[str, str]) -> AsyncIterator[ManagedProcess]:
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    spec = ProcessSpec(name=name, argv=argv, environ={**inherited, **environ})
    process = await ManagedProcess.start(spec, on_line=_show)
    try:
        yield process
    finally:
        await process.stop(STOP_S)


def _kill(running: list[ManagedProcess]) -> None:
    for process in running:
        process.kill()


def _show(name: str, line: str) -> None:
    print(f"[{name}] {line}", file=sys.stderr, flush=True)


async def _until_healthy(session: aiohttp.ClientSession, worker: local.LocalProcess, process: ManagedProcess) -> None:
    """Ask as the startup probe does; StartupError when the worker ends before, or takes too long."""
    url = f"http://{local.POD_IP}:{worker.ports['http']}{worker.health}"
    deadline_s = time.monotonic() + READY_S
    while time.monotonic() < deadline_s:
        if process.returncode is not None:
            raise StartupError(process.death().message)
        try:
            async with session.get(url, timeout=aiohttp.ClientTimeout(total=5)) as answer:
                if answer.status == 200:
                    return
        except (aiohttp.ClientError, TimeoutError):
            pass
        await asyncio.sleep(_POLL_S)
    raise StartupError(f"{worker.name} did not answer on {url} within {READY_S:.0f} s.")


async def _ask(session: aiohttp.ClientSession, url: str, cluster: ClusterConfig) -> DecisionRecord:
    """Send one prompt of token ids, to be split; return the router's record of it."""
    rng = random.Random(7)
    prompt = [rng.randrange(3, 500) for _ in range(NUM_TOKENS)]
    body = {"model": cluster.model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    key = next(iter(cluster.router.api_keys or ()), None)
    headers = {"x-tollbridge-policy": "split"} | ({"authorization": f"Bearer {key}"} if key else {})
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
        text = await answer.text()
        if answer.status != 200:
            raise TollbridgeError(f"the router answered {answer.status}: {text[:300]}")
        decision = msgspec.json.decode(answer.headers["x-tollbridge-decision"])
    async with RouterClient(url, api_key=key) as client:
        record = await client.maybe_record(decision["id"])
    if record is None:
        raise TollbridgeError("the router kept no record of the request.")
    return record


async def _drain(workers: list[local.LocalProcess]) -> tuple[dict[str, float], list[int]]:
    """Run every worker's preStop; return how long each took, and how each ended."""
    took_s: dict[str, float] = {}
    codes: list[int] = []
    for worker in (each for each in workers if each.pre_stop):
        begun_s = time.monotonic()
        environ = {**os.environ, **worker.environ}
        done = await asyncio.to_thread(subprocess.run, worker.pre_stop, env=environ, check=False, timeout=300)
        took_s[worker.name] = round(time.monotonic() - begun_s, 2)
        codes.append(done.returncode)
    return took_s, codes


def _checked(record: DecisionRecord, start_s: float, drain_s: dict[str, float], *, drained: bool) -> Checked:
    happened = record.happened
    return Checked(
        verified=record.decision.choice == "split" and bool(happened.split_verified),
        choice=record.decision.choice,
        why=record.decision.why,
        prompt_tokens=NUM_TOKENS,
        loaded_tokens=happened.decode_report.loaded_tokens if happened.decode_report else None,
        start_s=round(start_s, 1),
        drain_s=drain_s,
        drained=drained,
    )
