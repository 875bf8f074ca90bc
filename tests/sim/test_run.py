"""Whole simulations: nothing is lost, the same seed is the same result, and queues obey their formula."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from tests.sim.build import ENGINE, NO_OVERHEAD, PAIR, arrival, scenario, serve
from tollbridge.config.calibration import DecodeFit, PrefillFit
from tollbridge.cost.toll import last_arrival_s
from tollbridge.errors import ConfigError
from tollbridge.policy.registry import POLICIES
from tollbridge.sim.run import Simulation, compare, draw_arrivals
from tollbridge.sim.scenario import (
    ClassSpec,
    EngineSpec,
    FailureSpec,
    GroupSpec,
    LengthSpec,
    NetworkSpec,
    RandomFailures,
    WorkloadSpec,
)

TRAFFIC = WorkloadSpec(
    rate_per_s=6.0,
    burstiness_cv=2.0,
    classes=[
        ClassSpec(
            prompt_tokens=LengthSpec(median=300, sigma=0.8, max=1500),
            output_tokens=LengthSpec(median=20, sigma=0.7, max=200),
            prefix_tokens=128,
            num_prefixes=4,
        )
    ],
)
FLEET = [GroupSpec(count=2, prefer="prefill", per_host=2), GroupSpec(count=3, prefer="decode")]
TIGHT = msgspec.structs.replace(ENGINE, kv_cache_tokens=2048, max_pinned_fraction=0.2)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_and_every_block_comes_back(policy: str) -> None:
    """Small caches, a slow network, bursts, and workers that die: what came in goes out, once, and leaves nothing."""
    made = scenario(workload=TRAFFIC, fleet=FLEET, engine=TIGHT, random_failures=RandomFailures(mean_s=8.0, down_s=2.0))
    arrivals = draw_arrivals(made, 3)
    simulation, result = serve(made, arrivals, policy)
    assert result.num_requests == len(arrivals)
    assert result.num_failed < len(arrivals) / 2
    for worker in simulation.workers:
        assert worker.is_idle
        assert worker.pool.num_free == worker.pool.num_blocks
        statistics = worker.scheduler.statistics()
        assert (statistics.num_waiting, statistics.num_running, statistics.num_parked, statistics.num_pinned) == (
            0,
        ) * 4
    for router in simulation.routers:
        fleet = router.fleet.statistics()
        assert (fleet.num_prefills, fleet.num_decodes) == (0, 0)
        router.look()
        assert all(worker.load.is_settled for worker in router.fleet)
    assert all(not flows for flows in simulation.network._flows.values())
    simulation.check()


def test_the_same_seed_gives_the_same_bytes() -> None:
    made = scenario(workload=TRAFFIC, fleet=FLEET, failures=[FailureSpec(worker="w3", at_s=5.0, down_s=3.0)])
    first, again = (compare(made, draw_arrivals(made, 7), seed=7) for _ in range(2))
    assert msgspec.json.encode(first) == msgspec.json.encode(again)
    other = compare(made, draw_arrivals(made, 8), seed=8)
    assert msgspec.json.encode(first) != msgspec.json.encode(other)


def test_a_local_request_alone_takes_what_the_model_says() -> None:
    """1,000 tokens in chunks of 512 and 488: 0.004 + 0.0512, 0.004 + 0.0488; then nine steps of 0.011."""
    _, result = serve(scenario(), [arrival(0, 1.0, 1000, 10)], "local")
    assert result.ttft_s.p50 == pytest.approx(0.108)
    assert result.tpot_s.p50 == pytest.approx(0.011)
    assert result.wire_bytes == 0.0


@pytest.mark.parametrize("nic", [1e6, 8e6, 50e6])
def test_a_split_alone_takes_the_recursion_and_one_step(nic: float) -> None:
    """Ten layers a chunk leave as they are computed; decode asks for all tokens but the last, and computes that."""
    made = scenario(network=NetworkSpec(nic_bytes_per_s=nic, latency_s=0.0))
    _, result = serve(made, [arrival(0, 0.0, 1000, 10)], "split")
    pieces, start_s, left = [], 0.0, 999.0
    for size, took_s in ((512, 0.0552), (488, 0.0528)):
        pieces += [(start_s + took_s * layer / 10, 1000.0 * min(left, size) / 10) for layer in range(1, 11)]
        start_s, left = start_s + took_s, left - size
    assert result.ttft_s.p50 == pytest.approx(last_arrival_s(pieces, nic) + 0.011, rel=1e-3)
    assert result.wire_bytes == pytest.approx(999_000.0)


QUICK = EngineSpec(
    prefill=PrefillFit(alpha_s=1e-5, beta_s_per_token=1e-7),
    decode=DecodeFit(step_s=1e-5),
    kv_cache_tokens=65_536,
    max_num_batched_tokens=8192,
)  # the wire is nearly all there is


@pytest.mark.parametrize(("num_receivers", "median_s"), [(8, 8.0), (1, 4.5)], ids=["fair", "in turn"])
def test_eight_splits_over_one_nic_take_eight_times_the_wire_of_one(num_receivers: int, median_s: float) -> None:
    """Over one connection they go one after the other, over eight all at once: the last one ends at the same time."""
    fleet = [GroupSpec(count=1, prefer="prefill"), GroupSpec(count=num_receivers, prefer="decode")]
    made = scenario(engine=QUICK, fleet=fleet)
    _, one = serve(made, [arrival(0, 0.0, 1001, 2)], "split")
    _, eight = serve(made, [arrival(index, 0.0, 1001, 2) for index in range(8)], "split")
    assert one.ttft_s.p50 == pytest.approx(1.0, rel=0.01)
    assert eight.ttft_s.p50 == pytest.approx(median_s, rel=0.01)
    assert eight.ttft_s.p99 == pytest.approx(8.0, rel=0.02)


def test_moving_kv_takes_its_time_of_both_cores() -> None:
    """1 MB at 1e-7 s a byte makes prefill 0.1 s longer, but for the last layer of its 488 last tokens, which leaves
    when it has ended. Where KV comes at 10 MB/s, the steps of a stream double meanwhile."""
    engine = msgspec.structs.replace(ENGINE, io_s_per_byte=1e-7)
    fast = NetworkSpec(nic_bytes_per_s=1e9, latency_s=0.0)
    _, free = serve(scenario(network=fast), [arrival(0, 0.0, 1000, 2)], "split")
    _, paid = serve(scenario(network=fast, engine=engine), [arrival(0, 0.0, 1000, 2)], "split")
    assert paid.ttft_s.p50 - free.ttft_s.p50 == pytest.approx(0.1 - 0.00488, rel=0.01)

    slow = NetworkSpec(nic_bytes_per_s=1e7, latency_s=0.0)
    gaps: list[float] = []
    for spec in (ENGINE, engine):
        simulation = Simulation(scenario(network=slow, engine=spec), "split", seed=1)
        simulation.on_record = lambda index, record: gaps.extend(
            [b - a for a, b in pairwise(record.token_times)] if index == 0 else []
        )
        simulation.run([arrival(0, 0.0, 20, 60), arrival(1, 0.2, 1000, 2)])
    assert max(gaps[:59]) == pytest.approx(0.012)  # two streams at most
    assert max(gaps[59:]) == pytest.approx(0.022)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_worker_is_an_m_d_1_queue(load: float) -> None:
    """Prompts of one length, one token out, one prompt a step: mean TTFT = D + load x D / (2 (1 - load))."""
    service_s = 0.02
    engine = EngineSpec(
        prefill=PrefillFit(alpha_s=0.0, beta_s_per_token=service_s / 512),
        decode=DecodeFit(step_s=0.0),
        max_num_batched_tokens=512,
        kv_cache_tokens=512 * 600,
        block_size=512,
    )
    traffic = WorkloadSpec(
        rate_per_s=load / service_s,
        classes=[ClassSpec(prompt_tokens=LengthSpec(median=512), output_tokens=LengthSpec(median=1))],
    )
    made = scenario(engine=engine, fleet=[GroupSpec(count=1)], workload=traffic, duration_s=80.0)
    means = [serve(made, draw_arrivals(made, seed), "local")[1].ttft_s.mean for seed in range(3)]
    expected_s = service_s + load * service_s / (2 * (1 - load))
    assert sum(means) / 3 == pytest.approx(expected_s, rel=0.07)


def test_a_shared_prefix_is_computed_once_and_found_by_the_router() -> None:
    kinds = [ClassSpec(prompt_tokens=LengthSpec(median=640), prefix_tokens=512, num_prefixes=1)]
    made = scenario(fleet=[GroupSpec(count=1)], workload=WorkloadSpec(rate_per_s=1.0, classes=kinds))
    arrivals = draw_arrivals(made, 1)
    _, result = serve(made, arrivals, "local")
    assert result.hit_ratio == pytest.approx(512 / 640 * (len(arrivals) - 1) / len(arrivals), rel=0.01)


def test_a_stream_goes_on_elsewhere_when_its_worker_dies() -> None:
    """Ten tokens are out when w0 dies; the other worker computes the prompt and these again, and then the rest."""
    made = scenario(
        fleet=[GroupSpec(count=2)], failures=[FailureSpec(worker="w0", at_s=0.2, down_s=5.0)], workload=TRAFFIC
    )
    _, result = serve(made, [arrival(0, 0.0, 400, 50)], "local")
    assert (result.num_failed, result.num_retries) == (0, 1)
    assert result.output_tokens_per_s * made.duration_s == pytest.approx(50)
    assert result.itl_s.p99 > 0.04 > result.itl_s.p90


def test_prefill_that_dies_costs_time_and_no_request() -> None:
    made = scenario(fleet=PAIR, failures=[FailureSpec(worker="w0", at_s=0.05, down_s=5.0)])
    _, result = serve(made, [arrival(0, 0.0, 1000, 10)], "split")
    assert (result.num_failed, result.wire_bytes) == (0, 0.0)
    assert result.ttft_s.p50 == pytest.approx(0.05 + 0.108, abs=0.02)


def test_with_nobody_left_requests_fail() -> None:
    made = scenario(fleet=[GroupSpec(count=1)], failures=[FailureSpec(worker="w0", at_s=0.5, down_s=50.0)])
    _, result = serve(made, [arrival(0, 0.0, 100, 500), arrival(1, 1.0, 100, 5)], "local")
    assert (result.num_failed, result.good) == (2, 0.0)


def test_policies_see_the_same_arrivals() -> None:
    made = scenario(workload=TRAFFIC, fleet=FLEET, policies=["local", "split"])
    arrivals = draw_arrivals(made, 2)
    both = compare(made, arrivals, seed=2)
    assert [each.num_requests for each in both.policies] == [len(arrivals)] * 2
    assert both.policies[1].num_split > 0 == both.policies[0].num_split


def test_routers_share_the_fleet_out() -> None:
    made = scenario(workload=TRAFFIC, fleet=[GroupSpec(count=5)], routers=2, overhead=NO_OVERHEAD)
    simulation = Simulation(made, "local", seed=1)
    names = [sorted(router.workers) for router in simulation.routers]
    assert names == [["w0", "w2", "w4"], ["w1", "w3"]]


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_tokens"):
        compare(scenario(), [arrival(0, 0.0, 9000, 1)], seed=1)
    with pytest.raises(ConfigError, match="Did you mean"):
        compare(scenario(policies=["locale"]), [], seed=1)


def test_gaps_have_the_burstiness_that_was_asked_for() -> None:
    for cv in (0.0, 1.0, 3.0):
        made = scenario(workload=WorkloadSpec(rate_per_s=50.0, burstiness_cv=cv), duration_s=400.0)
        times = [each.at_s for each in draw_arrivals(made, 1)]
        gaps = [b - a for a, b in pairwise(times)]
        mean = sum(gaps) / len(gaps)
        spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
        assert mean == pytest.approx(0.02, rel=0.1)
        assert spread / mean == pytest.approx(cv, rel=0.1, abs=1e-9)


def test_random_failures_are_drawn_from_the_seed() -> None:
    made = scenario(random_failures=RandomFailures(mean_s=5.0))
    drawn = [Simulation(made, "local", seed=seed)._failures for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
