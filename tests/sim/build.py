"""Small scenarios and what they are served with."""

from __future__ import annotations

import msgspec

from tollbridge.config.calibration import DecodeFit, PrefillFit
from tollbridge.sim.arrivals import Arrival, own_range
from tollbridge.sim.results import PolicyResult
from tollbridge.sim.run import Simulation
from tollbridge.sim.scenario import EngineSpec, GroupSpec, NetworkSpec, OverheadSpec, Scenario

ENGINE = EngineSpec(
    prefill=PrefillFit(alpha_s=0.004, beta_s_per_token=1e-4),
    decode=DecodeFit(step_s=0.01, per_decode_s=0.001),
    num_layers=10,
    kv_cache_tokens=8192,
    max_num_batched_tokens=512,
    max_num_seqs=16,
)
NO_OVERHEAD = OverheadSpec(local_s=0.0, split_s=0.0)
PAIR = [GroupSpec(count=1, prefer="prefill"), GroupSpec(count=1, prefer="decode")]


def scenario(**more: object) -> Scenario:
    """One prefill and one decode worker, 1,000 bytes a token, 1 MB/s, and no fixed costs, unless said otherwise."""
    base = Scenario(
        kv_bytes_per_token=1000.0,
        engine=ENGINE,
        fleet=PAIR,
        network=NetworkSpec(nic_bytes_per_s=1e6, latency_s=0.0),
        overhead=NO_OVERHEAD,
        duration_s=20.0,
    )
    return msgspec.structs.replace(base, **more)


def arrival(index: int, at_s: float, num_prompt: int, num_output: int) -> Arrival:
    return Arrival(at_s, (own_range(index, num_prompt),), num_output)


def serve(
    made: Scenario, arrivals: list[Arrival], policy: str, *, fast: bool = True
) -> tuple[Simulation, PolicyResult]:
    """Run to the end, the legs that nobody waits for included."""
    simulation = Simulation(made, policy, seed=1, fast=fast)
    result = simulation.run(arrivals)
    agenda, end_s = simulation.agenda, simulation.agenda.now_s + 60.0
    agenda.run(until=lambda: agenda.now_s > end_s or all(worker.is_idle for worker in simulation.workers))
    return simulation, result
