"""Decode steps computed at once leave everything exactly as step by step: results, caches, even who is evicted next."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.sim.build import ENGINE, scenario, serve
from tollbridge.sim.arrivals import synthetic
from tollbridge.sim.run import Simulation
from tollbridge.sim.scenario import (
    ClassSpec,
    FailureSpec,
    GroupSpec,
    LengthSpec,
    NetworkSpec,
    Scenario,
    WorkloadSpec,
)


def state(simulation: Simulation) -> list[Any]:
    """Return what a later request could notice of the workers."""
    return [
        (
            worker.computed_tokens_total,
            worker.preemptions_total,
            worker.pool._references,
            worker.pool._hashes,
            worker.pool._blank,
            list(worker.pool._evictable),
        )
        for worker in simulation.workers
    ]


def busy(
    rate: float, cache_tokens: int, output: int, prefix: int, failures: list[FailureSpec], io_s_per_byte: float = 0.0
) -> Scenario:
    """A fleet of three whose caches are small, so that they evict and preempt."""
    kinds = [
        ClassSpec(
            prompt_tokens=LengthSpec(median=150, sigma=0.8, max=700),
            output_tokens=LengthSpec(median=output, sigma=0.7, max=300),
            prefix_tokens=prefix,
            num_prefixes=3,
        ),
        ClassSpec(prompt_tokens=LengthSpec(median=40), output_tokens=LengthSpec(median=80)),
    ]
    return scenario(
        engine=msgspec.structs.replace(
            ENGINE, kv_cache_tokens=cache_tokens, max_num_seqs=8, io_s_per_byte=io_s_per_byte
        ),
        fleet=[GroupSpec(count=1, prefer="prefill"), GroupSpec(count=2, prefer="decode")],
        network=NetworkSpec(nic_bytes_per_s=3e6, latency_s=1e-4),
        workload=WorkloadSpec(rate_per_s=rate, classes=kinds),
        duration_s=8.0,
        failures=failures,
    )


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    policy=st.sampled_from(["local", "split", "adaptive", "llm-d"]),
    rate=st.floats(0.5, 12.0),
    cache_tokens=st.sampled_from([1040, 2048, 8192]),
    output=st.integers(5, 90),
    prefix=st.sampled_from([0, 64]),
    dies=st.booleans(),
    io_s_per_byte=st.sampled_from([0.0, 1e-7]),
)
@example(
    seed=65536,
    policy="adaptive",
    rate=10.7109375,
    cache_tokens=1040,
    output=63,
    prefix=64,
    dies=False,
    io_s_per_byte=0.0,
)
def test_fast_forward_changes_nothing(
    seed: int, policy: str, rate: float, cache_tokens: int, output: int, prefix: int, dies: bool, io_s_per_byte: float
) -> None:
    failures = [FailureSpec(worker="w1", at_s=2.5, down_s=1.0)] if dies else []
    made = busy(rate, cache_tokens, output, prefix, failures, io_s_per_byte)
    arrivals = synthetic(made.workload, made.duration_s, Random(seed))
    fast, fast_result = serve(made, arrivals, policy)
    slow, slow_result = serve(made, arrivals, policy, fast=False)
    assert msgspec.json.encode(fast_result) == msgspec.json.encode(slow_result)
    assert state(fast) == state(slow)
    fast.check()
    assert fast.agenda.num_events <= slow.agenda.num_events


def test_it_is_worth_it() -> None:
    made = busy(1.0, 8192, 200, 0, [])
    arrivals = synthetic(made.workload, made.duration_s, Random(1))
    fast, _ = serve(made, arrivals, "local")
    slow, _ = serve(made, arrivals, "local", fast=False)
    assert fast.agenda.num_events < 0.5 * slow.agenda.num_events
