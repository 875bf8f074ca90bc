"""What every handler of the door shares: the engine, who we are, the limits, and how many requests are inside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tollbridge.clock import Clock
from tollbridge.engine.base import Engine
from tollbridge.errors import ModelNotFoundError, OverloadedError, UnavailableError
from tollbridge.obs.metrics import WorkerMetrics
from tollbridge.obs.tracing import NoTracer, Tracer
from tollbridge.transfer.base import TransferStatistics
from tollbridge.wire.bodies import Bodies
from tollbridge.worker.bridge import Bridge
from tollbridge.worker.prompts import Prompts

MAX_WAITING_REQUESTS = 512  # inside the door beyond those that the engine runs at once; more get 429


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who this process is, as the ready line and `/tollbridge/status` tell it."""

    name: str
    incarnation: str  # random per process: a new one means that every block is gone
    model_names: tuple[str, ...]  # accepted in requests; the first is the one we answer with
    kv: str | None = None  # host:port of the KV listener
    events: str | None = None  # ZMQ endpoints
    replay: str | None = None


@dataclass(frozen=True, kw_only=True)
class Limits:
    max_open: int  # requests inside the door: waiting, parked or running
    max_body_bytes: int
    max_connections: int = 8192
    max_bodies_bytes: int = 512 << 20  # being received, all together
    head_timeout_s: float = 10.0  # to receive the head of a request
    body_timeout_s: float = 60.0  # the same for its whole body
    body_idle_s: float = 10.0  # how long a body may stand still
    linger_s: float = 2.0  # how long a refused body is read and thrown away, so that the client sees the answer
    write_timeout_s: float = 120.0  # for a client that does not read


def _no_transfers() -> dict[str, TransferStatistics]:
    return {}


@dataclass(kw_only=True)
class Door:
    """Shared by the handlers; used from the event loop only."""

    engine: Engine
    identity: Identity
    secret: bytes | None = field(repr=False)
    limits: Limits
    clock: Clock
    metrics: WorkerMetrics
    prompts: Prompts
    bridge: Bridge
    transfers: Callable[[], dict[str, TransferStatistics]] = _no_transfers  # by side: "send", "receive"
    started_s: int = 0  # Unix seconds
    tracer: Tracer = field(default_factory=NoTracer)
    draining: bool = False
    engine_stopped: bool = False  # it refused a request because it had stopped
    num_open: int = 0
    bodies: Bodies = field(init=False)
    _emptied: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    def __post_init__(self) -> None:
        limits = self.limits
        self.bodies = Bodies(
            who="worker",
            timeout_s=limits.body_timeout_s,
            idle_s=limits.body_idle_s,
            max_bytes=limits.max_bodies_bytes,
        )

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Count a request in; OverloadedError when the door is full, UnavailableError while it closes."""
        if self.draining:
            raise UnavailableError("This worker is shutting down: try another worker.")
        if self.num_open >= self.limits.max_open:
            raise OverloadedError(f"This worker already holds {self.num_open} requests, its limit: retry later.")
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1
            if self.num_open == 0:
                self._emptied.set()

    async def drain(self, grace_s: float) -> bool:
        """Refuse new requests and wait until those inside have ended; False when the grace ran out first."""
        self.draining = True
        self._emptied.clear()
        if self.num_open == 0:
            return True
        try:
            async with asyncio.timeout(grace_s):
                await self._emptied.wait()
        except TimeoutError:
            return False
        return True

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFoundError unless `name` is ours; no name means ours."""
        if name is not None and name not in self.identity.model_names:
            raise ModelNotFoundError(
                f"The model `{name[:200]}` does not exist here: this worker serves `{self.identity.model_names[0]}`.",
                param="model",
            )
