"""The life of a worker process: pin, load, listen, say so, serve, drain, stop.

stdout carries one line, the ready line (wire/ready.py); everything else is logged to stderr. SIGTERM and SIGINT drain:
/health turns 503, new requests are refused, running ones and unfinished KV sends get a grace. A second signal ends it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable

import msgspec

from tollbridge.clock import Clock, SystemClock
from tollbridge.config.address import parse_address
from tollbridge.config.cluster import ClusterConfig, WorkerConfig
from tollbridge.engine.base import Engine
from tollbridge.errors import StartupError
from tollbridge.obs import logs
from tollbridge.obs.metrics import WorkerMetrics
from tollbridge.obs.tracing import NoTracer, Tracer, make_tracer
from tollbridge.transfer.base import TransferStatistics
from tollbridge.wire.ready import Ready
from tollbridge.worker.app import Server, build_app, listen
from tollbridge.worker.bridge import Bridge
from tollbridge.worker.collector import StatisticsCollector
from tollbridge.worker.door import MAX_WAITING_REQUESTS, Door, Identity, Limits
from tollbridge.worker.events import EventPublisher
from tollbridge.worker.media import Media, maybe_media
from tollbridge.worker.prompts import Prompts

log = logging.getLogger("tollbridge.worker")

DRAIN_GRACE_S = 8.0  # less than the 10 s after which a supervisor insists
_PINNED_POLL_S = 0.02


def run_worker(*, cluster: ClusterConfig, worker: WorkerConfig, secret: bytes | None) -> int:
    """Serve `worker` until SIGTERM or SIGINT; return the exit code 0.

    Raises StartupError or another TollbridgeError when it cannot start, each with one sentence.
    """
    occupy_standard_files()
    logs.configure()
    if worker.cores is not None:
        pin(worker.cores)
    media = maybe_media(cluster, worker, secret)
    engine = _build(cluster, media)
    # torch and transformers leave some 350,000 objects that live as long as we do. Visiting them all, as a full
    # collection does, was measured to stall every stream for 0.19 s.
    gc.collect()
    gc.freeze()
    try:
        _event_loop().run(serve_until_signal(cluster, worker, secret, engine, media))
    finally:
        engine.shutdown()
    return 0


def occupy_standard_files() -> None:
    """Open /dev/null in place of a standard file that the process was started without.

    Else the next file gets its number, and a child, for whom 0 to 2 are something else, cannot inherit it: the KV
    cache as file 0 never reached the transfer's process.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def pin(cores: list[int]) -> None:
    """Keep this process, and the threads it starts from now on, on `cores`; StartupError when there are none such."""
    try:
        os.sched_setaffinity(0, cores)
    except (OSError, ValueError, AttributeError) as error:
        raise StartupError(
            f"The worker cannot be pinned to the cores {cores}: {error}. Name cores of this machine, or none."
        ) from None


def _build(cluster: ClusterConfig, media: Media | None) -> Engine:
    from tollbridge.engine.build import build_engine  # torch, after pinning: its threads inherit the cores

    return build_engine(
        cluster.model,
        cluster.engine,
        dtype=cluster.dtype,
        make_sender=media.make_sender if media else None,
        make_receiver=media.make_receiver if media else None,
    )


def _event_loop() -> asyncio.Runner:
    if sys.platform == "win32":
        return asyncio.Runner()
    import uvloop

    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


async def serve_until_signal(
    cluster: ClusterConfig, worker: WorkerConfig, secret: bytes | None, engine: Engine, media: Media | None
) -> None:
    """Listen, print the ready line, and serve; on a signal drain and stop. Owns all but the engine."""
    clock = SystemClock()
    stop = _Signals(asyncio.get_running_loop())
    events = EventPublisher(worker.events, engine.take_events, clock) if worker.events is not None else None
    identity = Identity(
        name=worker.name,
        incarnation=secrets.token_hex(16),
        model_names=(engine.info.name,),
        kv=media.kv if media else None,
        events=events.endpoint if events else None,
        replay=events.replay_endpoint if events else None,
    )
    tracer = make_tracer(service="tollbridge-worker")
    door = make_door(cluster, engine, identity, secret, clock, media.statistics if media else dict, tracer)
    try:
        address = parse_address(worker.url, scheme="http://")
        server = await listen(build_app(door, events), door.limits, address.host, address.port)
        _say_ready(identity, server)
        await stop.first.wait()
        await _end(door, server, stop.second)
    finally:
        await asyncio.to_thread(tracer.close)
        door.prompts.close()
        if events is not None:
            events.close()


def make_door(
    cluster: ClusterConfig,
    engine: Engine,
    identity: Identity,
    secret: bytes | None,
    clock: Clock,
    transfers: Callable[[], dict[str, TransferStatistics]],
    tracer: Tracer | None = None,
) -> Door:
    """Return the door over `engine`, with its metrics; call it on the event loop that will serve."""
    metrics = WorkerMetrics(engine.info.name)
    metrics.registry.register(StatisticsCollector(engine, transfers, metrics.labels))
    return Door(
        engine=engine,
        identity=identity,
        secret=secret,
        limits=Limits(
            max_open=cluster.engine.max_num_seqs + MAX_WAITING_REQUESTS,
            max_body_bytes=(cluster.router.max_body_mib + 1) << 20,  # what the router takes, and what it adds
        ),
        clock=clock,
        metrics=metrics,
        prompts=Prompts(engine.tokenizer, engine.info),
        bridge=Bridge(asyncio.get_running_loop(), clock),
        transfers=transfers,
        started_s=int(clock.wall()),
        tracer=tracer or NoTracer(),
    )


class _Signals:
    """SIGTERM and SIGINT: the first asks, the second insists."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._count)

    def _count(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


def _say_ready(identity: Identity, server: Server) -> None:
    ready = Ready(
        ready="worker",
        name=identity.name,
        url=server.url,
        pid=os.getpid(),
        kv=identity.kv,
        events=identity.events,
        model=identity.model_names[0],
        incarnation=identity.incarnation,
    )
    sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
    sys.stdout.flush()
    log.info("serving %s on %s", identity.model_names[0], server.url)


async def _end(door: Door, server: Server, insist: asyncio.Event) -> None:
    """Drain, or stop at once when somebody insists; then end the engine's requests and close the port."""
    log.info("draining: open=%d", door.num_open)
    drain = asyncio.create_task(_drain(door))
    impatient = asyncio.create_task(insist.wait())
    done, pending = await asyncio.wait({drain, impatient}, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    is_drained = drain in done and drain.result()
    log.info("stopping: drained=%s open=%d", is_drained, door.num_open)
    # Ends what is left, so that its streams get an honest last event before the port closes. It joins a thread.
    await asyncio.to_thread(door.engine.shutdown)
    await server.stop()


async def _drain(door: Door) -> bool:
    """Wait for requests, then for sends that other workers still wait for; False when the grace ran out first."""
    deadline_s = door.clock.monotonic() + DRAIN_GRACE_S
    if not await door.drain(DRAIN_GRACE_S):
        return False
    while door.engine.statistics().num_pinned_blocks:
        if door.clock.monotonic() > deadline_s:
            return False
        await asyncio.sleep(_PINNED_POLL_S)
    return True
