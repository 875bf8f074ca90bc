"""Puts an engine probe together: the system's clock and randomness, one session with the server."""

from __future__ import annotations

import random

from tollbridge.clock import SystemClock
from tollbridge.probe.engine import Effort, EngineProbe, EngineReport, Tell
from tollbridge.probe.server import Server


async def probe_engine(
    url: str, *, model: str | None, api_key: str | None, budget: int | None, effort: Effort, tell: Tell
) -> EngineReport:
    """Measure the server at `url`. TollbridgeError says in a sentence why it cannot be."""
    async with Server(url, api_key=api_key) as server:
        served = await server.served(model)
        probe = EngineProbe(server, served, effort=effort, clock=SystemClock(), rng=random.SystemRandom(), tell=tell)
        return await probe.run(budget)
