"""The router as a process: binds, says that it is ready, serves until SIGTERM, lets running requests finish."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TextIO

import msgspec
import uvloop
from aiohttp import web

from tollbridge.config.cluster import ClusterConfig, RouterConfig
from tollbridge.discovery.base import Discovery
from tollbridge.errors import ConfigError, StartupError, TollbridgeError
from tollbridge.obs.tracing import Tracer, make_tracer
from tollbridge.router.app import Extension, make_app, make_context
from tollbridge.router.limits import Limits
from tollbridge.wire.connections import Connections
from tollbridge.wire.ready import Ready

log = logging.getLogger("tollbridge.router")

SHUTDOWN_TIMEOUT_S = 0.5  # for handlers that are still there when the door closes: draining has come before
BACKLOG = 2048  # the default of 128 stalls bursts of connections by a second


def run_router(
    *,
    cluster: ClusterConfig,
    secret: bytes,
    ready_to: TextIO | None = None,
    limits: Limits | None = None,
    extensions: Sequence[Extension] = (),
) -> int:
    """Serve until SIGTERM or SIGINT and return the process's exit code.

    The ready line goes to `ready_to` (stdout), the sentence of an error to stderr.
    """
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(cluster, secret, ready_to or sys.stdout, limits or Limits(), extensions))
    except TollbridgeError as error:
        sys.stderr.write(f"tollbridge router: {error.message}\n")
        return error.exit_code
    return 0


async def _serve(
    cluster: ClusterConfig, secret: bytes, ready_to: TextIO, limits: Limits, extensions: Sequence[Extension]
) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with listening(cluster, secret, limits=limits, extensions=extensions) as url:
        settle_collector()
        ready = Ready(ready="router", name="router", url=url, pid=os.getpid(), model=cluster.model)
        ready_to.write(msgspec.json.encode(ready).decode() + "\n")
        ready_to.flush()
        await stop.wait()
        log.info("stopping: running requests have %g s to finish", limits.drain_s)


def settle_collector() -> None:
    """Make garbage collections rare and short, for a process that serves from now on."""
    gc.collect()
    gc.freeze()  # what lives as long as we do: no later collection need look at it
    gc.set_threshold(5_000, 20, 20)  # requests leave hardly any cycles, and looking for them took 4 % of the time


@asynccontextmanager
async def listening(
    cluster: ClusterConfig,
    secret: bytes,
    *,
    limits: Limits | None = None,
    tracer: Tracer | None = None,
    extensions: Sequence[Extension] = (),
    discovery: Discovery | None = None,
) -> AsyncIterator[str]:
    """Serve in the background and yield the router's URL; on leaving let running requests finish, refuse others (503),
    and only then close the door.

    Raises ConfigError or StartupError when it cannot start.
    """
    limits, router = limits or Limits(), cluster.router
    context = make_context(cluster, secret, limits=limits, tracer=tracer or make_tracer(), discovery=discovery)
    runner = web.AppRunner(
        make_app(context, extensions),
        handler_cancellation=True,  # otherwise a client that leaves never reaches the handler
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
    )
    tls = _tls(router.tls)
    await runner.setup()
    assert runner.server is not None
    connections = Connections(
        runner.server,
        who="router",
        max_connections=limits.max_connections,
        head_timeout_s=limits.head_timeout_s,
        access_log=None,
        auto_decompress=False,
        lingering_time=limits.linger_s,
    )
    try:
        async with _bound(connections, router, tls) as port:
            host = f"[{router.host}]" if ":" in router.host else router.host
            yield f"{'https' if tls else 'http'}://{host}:{port}"
            if not await context.drain.run(limits.drain_s):
                log.warning("stopping: %d requests did not end within %g s", len(context.active), limits.drain_s)
    finally:
        await runner.cleanup()


@asynccontextmanager
async def _bound(connections: Connections, router: RouterConfig, tls: ssl.SSLContext | None) -> AsyncIterator[int]:
    """Accept connections and yield the port; on leaving accept no more."""
    loop = asyncio.get_running_loop()
    try:
        server = await loop.create_server(connections, router.host, router.port, backlog=BACKLOG, ssl=tls)
    except OSError as error:
        where = f"http{'s' if tls else ''}://{router.host}:{router.port}"
        raise StartupError(f"The router cannot listen on {where}: {error.strerror or error}.") from error
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def _tls(files: dict[str, str] | None) -> ssl.SSLContext | None:
    if files is None:
        return None
    if set(files) != {"cert", "key"}:
        raise ConfigError("router.tls needs exactly the keys cert and key: two PEM files.", param="router.tls")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(files["cert"], files["key"])
    except (OSError, ssl.SSLError) as error:
        raise StartupError(f"router.tls cannot be loaded from {files['cert']} and {files['key']}: {error}.") from error
    return context
