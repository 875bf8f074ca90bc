"""`tollbridge worker vllm`: one vLLM server as a worker, in the foreground."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Annotated

import msgspec
from cyclopts import Parameter

from tollbridge.cli.interrupts import Interrupts, run_interruptible
from tollbridge.cli.options import ConfigFile, configure, find_worker
from tollbridge.config.address import Address, parse_address
from tollbridge.config.cluster import ClusterConfig, SecretConfig, WorkerConfig
from tollbridge.config.secret import require_secret
from tollbridge.errors import ConfigError, StartupError, TollbridgeError
from tollbridge.vllm import addresses
from tollbridge.vllm.environment import look_into
from tollbridge.vllm.launch import Command, Media, VllmWorker, command, render, transfer_options
from tollbridge.wire.ready import Ready
from tollbridge.worker.supervisor import MAX_LINES, ManagedProcess, ProcessSpec

READY_TIMEOUT_S = 3600.0  # a large model is read from disk first
STOP_GRACE_S = 30.0  # for vLLM to end its engine and workers
_POLL_S = 0.5
_CAUSE = re.compile(r"(?<![`.\w])(?:\w+\.)*([A-Z]\w*(?:Error|Exception)): (\S.*)")  # in backquotes: advice, no error
_CONSEQUENCES = ("initialization failed", "SystemExit")  # of a cause that was told further up
_PORTS: dict[Media, int] = {"tollbridge": 7801, "nixl": 5600, "nixl-push": 5600}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Options:
    """Flags. None: as the cluster file has it with --name, else the default."""

    host: Annotated[str | None, Parameter(help="Address for requests: 127.0.0.1 by default, 0.0.0.0 for all.")] = None
    port: Annotated[int | None, Parameter(help="Port for requests: 8100 by default, 0 for a free one.")] = None
    kv_host: Annotated[str | None, Parameter(help="Address that other workers dial for KV: found by default.")] = None
    kv_port: Annotated[int | None, Parameter(help="Port for KV: 7801 by default (NIXL 5600), 0 for a free one.")] = None
    events_port: Annotated[int | None, Parameter(help="Publish KV events here, replays on the next port.")] = None
    connector: Annotated[Media | None, Parameter(help="How KV moves: ours by default, or one of vLLM's.")] = None
    served_model_name: Annotated[str | None, Parameter(help="The model's name in requests.")] = None
    threads: Annotated[int | None, Parameter(help="On a CPU: compute threads.")] = None
    kv_cache_gib: Annotated[int, Parameter(help="On a CPU: KV cache.")] = 4
    python: Annotated[str, Parameter(help="The interpreter that has vLLM.", show_default=False)] = sys.executable
    allow_untested_vllm: Annotated[
        bool, Parameter(negative=(), show_default=False, help="Start with a vLLM version that was not tested.")
    ] = False


def vllm(
    *args: Annotated[
        str, Parameter(allow_leading_hyphen=True, help="The model; and after a --, what vLLM gets as it is.")
    ],
    name: Annotated[str | None, Parameter(help="Take model, addresses, connector from the cluster file.")] = None,
    config: ConfigFile = None,
    options: Options = Options(),
    print_: Annotated[
        bool,
        Parameter(name="--print", negative=(), show_default=False, help="Show the command line, start nothing."),
    ] = False,
) -> int:
    """Run a vLLM server until SIGTERM or Ctrl-C. It prints one JSON line once it serves."""
    model, extra_args = (args[0], args[1:]) if args and not args[0].startswith("-") else (None, args)
    cluster = configure(config, model=model).cluster if name is not None else None
    _check(options)
    worker = with_defaults(options, cluster, name, model)
    found = look_into(worker.python, os.environ)
    warning = found.check(worker.python, worker.media, allow_untested=worker.allow_untested)
    if warning:
        print(f"tollbridge: {warning}", file=sys.stderr)
    worker = replace(worker, target=found.target, extra_args=extra_args)
    launch = command(worker, os.environ)
    if print_:
        print(render(launch, os.environ))
        return 0
    if worker.media == "tollbridge":  # the connector reads the variable only
        launch.environ[worker.secret_env] = require_secret(cluster.secret if cluster else SecretConfig()).decode()
    return asyncio.run(run_interruptible(partial(_serve, worker, launch, name or "vllm")))


def _check(options: Options) -> None:
    """Raise ConfigError for numbers that vLLM would refuse a minute later, or not at all."""
    for flag, port in (("port", options.port), ("kv-port", options.kv_port), ("events-port", options.events_port)):
        if port is not None and not 0 <= port <= 65535:
            raise ConfigError(f"--{flag} is {port}: a port is a number from 0 to 65535.")
    for flag, count in (("threads", options.threads), ("kv-cache-gib", options.kv_cache_gib)):
        if count is not None and count < 1:
            raise ConfigError(f"--{flag} is {count}: give at least 1.")


def with_defaults(options: Options, cluster: ClusterConfig | None, name: str | None, model: str | None) -> VllmWorker:
    """Return the worker that flags and cluster file describe; ConfigError where they leave something open."""
    described = find_worker(cluster, name) if cluster is not None and name is not None else None
    media = options.connector or (described.connector if described else "tollbridge")
    url = parse_address(described.url, scheme="http://") if described else Address(host="127.0.0.1", port=8100)
    kv = _kv_of(described, media) if described else None
    host = options.host or url.host
    kv_host = addresses.kv_host(host, options.kv_host or (kv.host if kv else None))
    kv_port = _first(options.kv_port, kv.port if kv else None, _PORTS[media])
    events = parse_address(described.events, scheme="tcp://").port if described and described.events else 0
    served = cluster.model if cluster is not None else model
    if served is None:
        raise ConfigError("which model? Name it first, as in `tollbridge worker vllm MODEL`, or use --name.")
    return VllmWorker(
        model=served,
        host=host,
        port=_first(options.port, url.port) or addresses.free_port(host),
        kv_host=kv_host,
        kv_port=kv_port or addresses.free_port(kv_host),
        events_port=options.events_port or events or None,
        served_model_name=options.served_model_name,
        media=media,
        secret_env=(cluster.secret.env if cluster else None) or SecretConfig().env or "",
        threads=options.threads,
        kv_cache_gib=options.kv_cache_gib,
        transfer=transfer_options(cluster.transfer) if cluster is not None else {},
        allow_untested=options.allow_untested_vllm,
        python=options.python,
    )


def _kv_of(worker: WorkerConfig, media: Media) -> Address | None:
    """Return the KV address in the cluster file, None when a stock connector tells the router by itself."""
    address = parse_address(worker.kv)
    if address.port:
        return address
    if media != "tollbridge":
        return None
    raise ConfigError(
        f'worker {worker.name} has kv: "{worker.kv}", and no vLLM can tell the router which port it chose: write one.'
    )


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


async def _serve(worker: VllmWorker, launch: Command, name: str, interrupts: Interrupts) -> int:
    orphaned = signal.SIGTERM  # killed, it would leave its engine behind, and that the GPU's memory
    spec = ProcessSpec(name="vLLM", argv=launch.argv, environ=launch.environ, orphaned=orphaned)
    process = await ManagedProcess.start(spec, on_line=_show)
    interrupts.on_second = process.kill
    try:
        await _until_healthy(process, worker)
        print(msgspec.json.encode(_ready(worker, name, process.pid)).decode(), flush=True)
        await process.wait()
        raise process.death()
    finally:
        await process.stop(STOP_GRACE_S)


async def _until_healthy(process: ManagedProcess, worker: VllmWorker) -> None:
    """Wait for the server; StartupError with vLLM's own reason when it ends before."""
    import aiohttp

    url = f"http://{Address(host=_dialled(worker.host), port=worker.port)}/health"
    ended = asyncio.create_task(process.wait())
    try:
        async with asyncio.timeout(READY_TIMEOUT_S), aiohttp.ClientSession() as session:
            while not ended.done():
                with suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(url, timeout=aiohttp.ClientTimeout(total=5)) as answer:
                        if answer.status == 200 and not ended.done():
                            return
                await asyncio.wait({ended}, timeout=_POLL_S)
    except TimeoutError:
        raise StartupError(f"vLLM did not answer on {url} within {READY_TIMEOUT_S:.0f} s.") from None
    finally:
        ended.cancel()
    raise _why_not(process)


def _why_not(process: ManagedProcess) -> TollbridgeError:
    """Return the first error that vLLM wrote: what follows it are consequences."""
    lines = process.tail(MAX_LINES)
    for line, following in zip_longest(lines, lines[1:], fillvalue=""):
        match = _CAUSE.search(line)
        if match and not any(mark in match[2] for mark in _CONSEQUENCES):
            return StartupError(f"vLLM did not start: {_reason(match[2], following)} ({match[1]})")
    return StartupError(process.death().message)


def _reason(text: str, following: str) -> str:
    """Return `text`, or the line after it where pydantic has what is wrong."""
    return following.strip().partition(" [type=")[0] if "validation error" in text and following else text


def _ready(worker: VllmWorker, name: str, pid: int) -> Ready:
    host = _dialled(worker.host)
    return Ready(
        ready="worker",
        name=name,
        url=f"http://{Address(host=host, port=worker.port)}",
        pid=pid,
        kv=str(Address(host=worker.kv_host, port=worker.kv_port)),
        events=f"tcp://{Address(host=host, port=worker.events_port)}" if worker.events_port else None,
        model=worker.served_model_name or worker.model,
    )


def _dialled(host: str) -> str:
    if not addresses.is_wildcard(host):
        return host
    return "::1" if ":" in host else "127.0.0.1"


def _show(_: str, line: str) -> None:
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)
