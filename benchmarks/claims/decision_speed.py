"""How long a decision of `adaptive` takes, fleet view and prices given: 16 and 64 workers, half of them for prefill."""

from __future__ import annotations

import gc
import random
import time

import numpy as np

from benchmarks.support.result import ClaimResult
from tollbridge.config.calibration import Calibration, DecodeFit, EngineCalibration, PrefillFit
from tollbridge.cost.model import CostModel
from tollbridge.policy.adaptive import adaptive
from tollbridge.policy.pricing import Pricing
from tollbridge.policy.views import FleetView, RequestView, WorkerView

DESCRIPTION = "decision p99 of the policy adaptive with 16 and with 64 workers"

BOUNDS_MS = {16: 0.5, 64: 3.0}
SEED = 7
ENGINE = EngineCalibration(
    prefill=PrefillFit(alpha_s=0.005, beta_s_per_token=2e-4), decode=DecodeFit(step_s=0.02, per_decode_s=1e-3)
)


def run(quick: bool) -> ClaimResult:
    """Time decisions about mixed requests over fleets in random states, each worker on a host of its own."""
    num_decisions = 2_000 if quick else 20_000
    figures: dict[str, object] = {}
    holds = True
    for size, bound_ms in BOUNDS_MS.items():
        times_ms, splits = _measure(size, num_decisions)
        p50, p99 = (float(np.percentile(times_ms, q)) for q in (50, 99))
        figures |= {f"p50_ms_{size}": p50, f"p99_ms_{size}": p99, f"split_share_{size}": splits}
        holds = holds and p99 <= bound_ms
    return ClaimResult(
        holds=holds,
        figures=figures,
        bounds={f"p99_ms_{size}": f"<= {bound}" for size, bound in BOUNDS_MS.items()},
        conditions={
            "decisions": num_decisions,
            "seed": SEED,
            "what": "wall time of adaptive(request, fleet), one thread",
        },
    )


def _measure(size: int, num_decisions: int) -> tuple[list[float], float]:
    rng = random.Random(SEED)
    fleets = [_fleet(size // 2, rng) for _ in range(50)]
    times_ms, splits = [], 0
    gc.collect()
    for index in range(num_decisions):
        request = RequestView(
            id=str(index),
            prompt_tokens=rng.choice([20, 500, 3000, 8000]),
            max_tokens=200,
            cached={f"d{rng.randrange(size // 2)}": 400},
        )
        start_s = time.perf_counter()
        decision = adaptive(request, fleets[index % len(fleets)])
        times_ms.append(1e3 * (time.perf_counter() - start_s))
        splits += decision.choice == "split"
    return times_ms, splits / num_decisions


def _fleet(half: int, rng: random.Random) -> FleetView:
    names = [(f"{kind}{i}", kind) for kind in "pd" for i in range(half)]
    links = [(f"hp{i}", f"hd{j}", 3e9) for i in range(half) for j in range(half)]
    cost = CostModel.seeded(Calibration(engines={name: ENGINE for name, _ in names}), links)
    for at in range(100):
        cost.started(at * 0.1)
        cost.stalling(3000, at * 0.1)
    workers = tuple(
        WorkerView(
            name=name,
            prefer="prefill" if kind == "p" else "decode",
            kv=("127.0.0.1", 1),
            host=f"h{name}",
            kv_bytes_per_token=1e5,
            max_num_batched_tokens=2048,
            waiting_prefill_tokens=rng.choice([0, 0, 1000, 5000]),
            num_running=rng.randint(0, 20),
            free_kv_tokens=100_000,
            num_sending=rng.randint(0, 2) if kind == "p" else 0,
            sending_bytes=1e7,
        )
        for name, kind in names
    )
    return FleetView(workers=workers, pricing=Pricing(cost=cost, now_s=10.0))
