"""A thousand workers and an hour of traffic in the simulator, in under ten minutes, and twice the same.

The fleet: 200 workers that prefer to prefill, 800 that prefer to decode, each with a 10 Gb/s NIC, behind routers of 20
workers each; policy adaptive, so every request is priced on its router's workers. Workers die at random. Everything
that decides is the production code (docs/sim.md).
"""

from __future__ import annotations

import time

import msgspec

from benchmarks.support.result import ClaimResult
from tollbridge.sim.run import Simulation, draw_arrivals
from tollbridge.sim.scenario import (
    ClassSpec,
    EngineSpec,
    GroupSpec,
    LengthSpec,
    RandomFailures,
    Scenario,
    WorkloadSpec,
)

DESCRIPTION = "1,000 simulated workers, one hour of traffic: wall time, and the same result from the same seed"

SEED = 20261129
MAX_S = 600.0
WORKERS, QUICK_WORKERS = 1000, 100
HOUR_S, QUICK_S = 3600.0, 60.0
RATE_PER_WORKER_S = 0.03
PER_ROUTER = 20


def scenario(num_workers: int, duration_s: float) -> Scenario:
    """Return the fleet with its traffic: short chats, documents that share a prefix."""
    kinds = [
        ClassSpec(
            weight=3,
            prompt_tokens=LengthSpec(median=600, sigma=0.7, max=8192),
            output_tokens=LengthSpec(median=120, sigma=0.6, max=1024),
        ),
        ClassSpec(
            weight=1,
            prompt_tokens=LengthSpec(median=4096, sigma=0.4, max=16_384),
            output_tokens=LengthSpec(median=80, sigma=0.5, max=512),
            prefix_tokens=1024,
            num_prefixes=200,
        ),
    ]
    return Scenario(
        engine=EngineSpec(block_size=64, kv_cache_tokens=131_072),
        fleet=[
            GroupSpec(count=num_workers // 5, prefer="prefill"),
            GroupSpec(count=num_workers - num_workers // 5, prefer="decode"),
        ],
        workload=WorkloadSpec(rate_per_s=RATE_PER_WORKER_S * num_workers, burstiness_cv=1.5, classes=kinds),
        policies=["adaptive"],
        duration_s=duration_s,
        routers=max(1, num_workers // PER_ROUTER),
        random_failures=RandomFailures(mean_s=36_000.0),
    )


def run(quick: bool) -> ClaimResult:
    """Simulate the hour, and the start of it once more."""
    number, duration_s = (QUICK_WORKERS, QUICK_S) if quick else (WORKERS, HOUR_S)
    made = scenario(number, duration_s)
    start_s = time.perf_counter()
    arrivals = draw_arrivals(made, SEED)
    simulation = Simulation(made, "adaptive", seed=SEED)
    result = simulation.run(arrivals)
    took_s = time.perf_counter() - start_s
    same = _is_same(scenario(number, duration_s / 60))
    return ClaimResult(
        holds=took_s < MAX_S and same and result.num_failed < 0.01 * len(arrivals),
        figures={
            "wall_s": took_s,
            "same_result_twice": same,
            "requests": len(arrivals),
            "workers": number,
            "simulated_s": result.simulated_s,
            "events": simulation.agenda.num_events,
            "tokens_computed": sum(worker.computed_tokens_total for worker in simulation.workers),
            "failed": result.num_failed,
            "retried": result.num_retries,
            "split": result.num_split / max(1, result.num_requests),
            "within_slo": result.good,
            "prefix_hits": result.hit_ratio,
            "ttft_p50_s": result.ttft_s.p50,
            "ttft_p99_s": result.ttft_s.p99,
            "itl_p99_s": result.itl_s.p99,
            "wire_bytes": result.wire_bytes,
        },
        bounds={"wall_s": f"< {MAX_S:.0f}", "same_result_twice": "True", "failed": "< 1 % of the requests"},
        conditions={
            "policy": "adaptive, calibrated",
            "routers": made.routers,
            "arrivals": f"gamma, {made.workload.rate_per_s:.0f}/s, cv {made.workload.burstiness_cv}",
            "seed": SEED,
            "same_result_twice": "of the first sixtieth",
        },
    )


def _is_same(made: Scenario) -> bool:
    results = [
        msgspec.json.encode(Simulation(made, "adaptive", seed=SEED).run(draw_arrivals(made, SEED))) for _ in range(2)
    ]
    return results[0] == results[1]
