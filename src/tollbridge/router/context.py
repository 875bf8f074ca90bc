"""What every request shares: one object, made once by `app`, handed to each flow."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tollbridge.clock import Clock
from tollbridge.config.cluster import ClusterConfig
from tollbridge.errors import OverloadedError
from tollbridge.router.budget import RetryBudget
from tollbridge.router.decisions import Decisions
from tollbridge.router.fleet import Fleet
from tollbridge.router.learn import Learner
from tollbridge.router.limits import Limits
from tollbridge.router.metrics import RouterMetrics
from tollbridge.router.release import Releaser
from tollbridge.router.upstream import Upstream


@dataclass(frozen=True, kw_only=True)
class Context:
    config: ClusterConfig
    secret: bytes
    limits: Limits
    clock: Clock
    fleet: Fleet
    upstream: Upstream
    releaser: Releaser
    decisions: Decisions
    metrics: RouterMetrics
    learner: Learner
    budget: RetryBudget
    active: set[str] = field(default_factory=set)  # ids of the requests in flight

    @contextmanager
    def admit(self, request_id: str) -> Iterator[str]:
        """Count one request in flight and yield its id; OverloadedError when `max_concurrent` are in flight already.

        Two requests in flight never share an id (workers key their requests by it): the later one gets a suffix.
        """
        bound = self.config.router.max_concurrent
        if len(self.active) >= bound:
            raise OverloadedError(f"The router has {bound} requests in flight, its bound: try again in a moment.")
        while request_id in self.active:
            request_id = f"{request_id[:119]}-{secrets.token_hex(4)}"
        self.active.add(request_id)
        self.metrics.in_flight.set(len(self.active))
        try:
            yield request_id
        finally:
            self.active.discard(request_id)
            self.metrics.in_flight.set(len(self.active))
