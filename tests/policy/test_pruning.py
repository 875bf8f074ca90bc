"""What `adaptive` leaves out for the sake of speed changes nothing: over random fleets."""

from __future__ import annotations

import random

import pytest

from tests.policy.test_adaptive import SLO
from tests.policy.test_rules import KV
from tollbridge.config.calibration import Calibration, DecodeFit, EngineCalibration, PrefillFit
from tollbridge.cost.model import CostModel
from tollbridge.policy.adaptive import adaptive
from tollbridge.policy.estimates import Estimator, Side
from tollbridge.policy.pricing import Pricing
from tollbridge.policy.views import FleetView, RequestView, WorkerView

SEEDS = range(150)


def _case(rng: random.Random) -> tuple[RequestView, FleetView]:
    names = [f"w{at}" for at in range(rng.randint(2, 12))]
    engines = {
        name: EngineCalibration(
            prefill=PrefillFit(
                alpha_s=0.005, beta_s_per_token=rng.choice([2e-4, 8e-4]), residual=rng.choice([0.02, 0.3])
            ),
            decode=DecodeFit(step_s=0.02, per_decode_s=rng.choice([1e-3, 5e-3])),
        )
        for name in names
    }
    links = [(a, b, 10.0 ** rng.uniform(6, 9.5)) for a in names for b in names if rng.random() < 0.8]
    cost = CostModel.seeded(Calibration(engines=engines), links)
    for at in range(rng.choice([0, 40])):
        cost.started(at * 0.1)
        cost.stalling(3000, at * 0.1)
    workers = tuple(_worker(name, rng) for name in names)
    pricing = Pricing(cost=cost, slo=SLO, explore=rng.choice([0.0, 0.5]), now_s=4.0)
    cached = {name: rng.choice([16, 400, 3000]) for name in names if rng.random() < 0.3}
    request = RequestView(
        id=str(rng.random()), prompt_tokens=rng.choice([20, 500, 3000, 9000]), max_tokens=200, cached=cached
    )
    return request, FleetView(workers=workers, pricing=pricing)


def _worker(name: str, rng: random.Random) -> WorkerView:
    return WorkerView(
        name=name,
        prefer=rng.choice(["prefill", "decode", "any"]),
        kv=KV,
        host=name,
        kv_bytes_per_token=46_080,
        max_num_batched_tokens=rng.choice([0, 512]),
        waiting_prefill_tokens=rng.choice([0, 0, 4000]),
        num_running=rng.randrange(12),
        free_kv_tokens=rng.choice([None, 5_000, 100_000]),
        num_sending=rng.choice([0, 2]),
        sending_bytes=1e7,
        suspect=rng.random() < 0.05,
        revision=rng.choice(["", "", "new"]),
    )


def test_no_split_costs_less_than_its_bound() -> None:
    for seed in SEEDS:
        request, fleet = _case(random.Random(seed))
        estimator = Estimator(request, fleet)
        sides = [estimator.side(worker) for worker in fleet.workers]
        for prefill in sides:
            for decode in sides:
                split = estimator.split(prefill, decode)
                assert split is None or estimator.least_pair_cost(prefill, decode) <= split.cost, seed


def test_a_pair_that_is_not_priced_would_not_have_been_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = [adaptive(*_case(random.Random(seed))) for seed in SEEDS]

    def unknown(self: Estimator, prefill: Side, decode: Side) -> float:
        return float("-inf")

    monkeypatch.setattr(Estimator, "least_pair_cost", unknown)
    assert quick == [adaptive(*_case(random.Random(seed))) for seed in SEEDS]
    assert any(decision.choice == "split" for decision in quick)


def test_no_pair_crosses_revisions() -> None:
    """Not even in the middle of a rolling update, when both revisions have workers of both roles."""
    num_splits = 0
    for seed in SEEDS:
        request, fleet = _case(random.Random(seed))
        decision = adaptive(request, fleet)
        revisions = {worker.name: worker.revision for worker in fleet.workers}
        if decision.prefill is not None:
            num_splits += 1
            assert revisions[decision.prefill] == revisions[decision.decode], seed
    assert num_splits
