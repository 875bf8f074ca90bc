"""What every request shares: one object, made once by `app`, handed to each flow."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from tollbridge.clock import Clock
from tollbridge.config.cluster import ClusterConfig
from tollbridge.discovery.base import Discovery
from tollbridge.obs.tracing import Tracer
from tollbridge.router.admission import Admission
from tollbridge.router.budget import RetryBudget
from tollbridge.router.decisions import Decisions
from tollbridge.router.drain import Drain
from tollbridge.router.fleet import Fleet
from tollbridge.router.index import IndexFeeder
from tollbridge.router.ingress import Call
from tollbridge.router.learn import Learner
from tollbridge.router.limits import Limits
from tollbridge.router.metrics import RouterMetrics
from tollbridge.router.release import Releaser
from tollbridge.router.roster import Roster
from tollbridge.router.sessions import Sessions
from tollbridge.router.tenants import Tenants
from tollbridge.router.tokens import Tokens
from tollbridge.router.upstream import Upstream
from tollbridge.wire.bodies import Bodies


@dataclass(frozen=True, kw_only=True)
class Context:
    config: ClusterConfig
    secret: bytes
    limits: Limits
    clock: Clock
    fleet: Fleet
    discovery: Discovery
    roster: Roster
    upstream: Upstream
    feeder: IndexFeeder
    tokens: Tokens
    releaser: Releaser
    sessions: Sessions
    decisions: Decisions
    metrics: RouterMetrics
    learner: Learner
    tracer: Tracer
    budget: RetryBudget
    tenants: Tenants
    admission: Admission
    bodies: Bodies
    active: set[str] = field(default_factory=set)  # ids of the requests inside, waiting ones included
    drain: Drain = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "drain", Drain(self.active))

    @contextmanager
    def name(self, request_id: str) -> Iterator[str]:
        """Yield the id under which the request runs.

        Two requests inside never share an id (workers key their requests by it): the later one gets a suffix.
        """
        while request_id in self.active:
            request_id = f"{request_id[:119]}-{secrets.token_hex(4)}"
        self.active.add(request_id)
        try:
            yield request_id
        finally:
            self.active.discard(request_id)
            self.drain.left()

    def left_s(self, call: Call, arrived_s: float) -> float | None:
        """Return what is left of the deadline of `call`, which came at `arrived_s`; None without one."""
        if call.timeout_s is None:
            return None
        return max(call.timeout_s - (self.clock.monotonic() - arrived_s), 0.0)

    @asynccontextmanager
    async def place(self, call: Call, tenant: str, arrived_s: float) -> AsyncIterator[float]:
        """Hold one of the places for requests in flight; yield the seconds waited for it. See `Admission.place`."""
        async with self.admission.place(
            tenant,
            work=1.0 + call.body_bytes,
            num_bytes=call.body_bytes,
            patience_s=self.config.router.queue_timeout_s,
            left_s=self.left_s(call, arrived_s),
            priority=call.priority,
        ) as waited_s:
            self.metrics.queue.labels(tenant).observe(waited_s)
            yield waited_s
