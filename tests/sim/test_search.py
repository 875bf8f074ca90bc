"""The search finds what a calculation says, and does not claim what it cannot tell."""

from __future__ import annotations

import math

import msgspec
import pytest

from tests.sim.build import scenario
from tollbridge.config.calibration import DecodeFit, PrefillFit
from tollbridge.config.cluster import SloConfig
from tollbridge.errors import ConfigError
from tollbridge.sim.scenario import (
    ClassSpec,
    EngineSpec,
    GroupSpec,
    LengthSpec,
    NetworkSpec,
    TraceSpec,
    WorkloadSpec,
)
from tollbridge.sim.search import _found, candidates, interval, placed, search
from tollbridge.sim.topology import Topology

# Gaps of a long prompt break the SLO of everybody beside it, so nothing but a split can do; prefill is the bottleneck.
STRICT = scenario(
    engine=EngineSpec(
        prefill=PrefillFit(alpha_s=0.0, beta_s_per_token=2e-4),
        decode=DecodeFit(step_s=0.01),
        kv_cache_tokens=32_768,
    ),
    fleet=[GroupSpec(count=3)],
    network=NetworkSpec(nic_bytes_per_s=1e9),
    workload=WorkloadSpec(
        rate_per_s=2.0,
        burstiness_cv=0.0,
        classes=[ClassSpec(prompt_tokens=LengthSpec(median=1000), output_tokens=LengthSpec(median=100))],
    ),
    slo=SloConfig(ttft_s=1.0, tpot_s=0.05, itl_p99_s=0.05),
    policies=["local", "split"],
    duration_s=10.0,
)


def test_two_that_prefill_and_one_that_decodes_is_found() -> None:
    """Prefill takes 0.2 s: with two prefill workers 10 requests/s at most, with one 5, in steps of a token budget."""
    made = search(STRICT, [1])
    assert made.found[0].name == "2 P : 1 D, split"
    assert made.found[0].mean * 3 == pytest.approx(10.0, rel=0.1)
    by_name = {found.name: found for found in made.found}
    assert by_name["1 P : 2 D, split"].mean * 3 == pytest.approx(5.0, rel=0.1)
    assert by_name["3 alike, local"].mean < by_name["1 P : 2 D, split"].mean


def test_worse_is_only_who_is_worse_in_every_seed_or_nearly() -> None:
    options = candidates(STRICT)
    best, close, worse = [10.0, 11.0, 12.0], [11.0, 9.0, 12.5], [8.0, 9.1, 10.2]
    assert not _found(options[1], close, best).is_worse
    assert _found(options[2], worse, best).is_worse


def test_all_ratios_and_both_placements_are_tried() -> None:
    four = msgspec.structs.replace(STRICT, fleet=[GroupSpec(count=4, per_host=2)])
    names = [option.name for option in candidates(four)]
    assert names[0] == "4 alike, local"
    assert len(names) == 1 + 3 * 2
    together = next(option for option in candidates(four) if option.together and option.num_prefill == 2)
    topology = Topology(placed(four, together))
    kinds: dict[str, set[str]] = {}
    for worker, host in topology.hosts.items():
        kinds.setdefault(host, set()).add(topology.prefers[worker])
    assert kinds == {"h0": {"prefill", "decode"}, "h1": {"prefill", "decode"}}
    assert topology.path("h0", "h0") == ("bus h0",)


def test_an_interval_is_students() -> None:
    mean, half = interval([1.0, 2.0, 3.0])
    assert (mean, half) == (2.0, pytest.approx(4.303 / math.sqrt(3)))
    assert interval([1.0]) == (1.0, math.inf)


def test_a_trace_has_no_rate_to_vary() -> None:
    traced = msgspec.structs.replace(STRICT, workload=WorkloadSpec(trace=TraceSpec(format="azure", path="it")))
    with pytest.raises(ConfigError, match="trace"):
        search(traced, [1])
