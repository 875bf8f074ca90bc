"""How many workers should prefill, how many decode, and where: the best goodput per GPU, with its uncertainty.

For every placement and policy the highest arrival rate is sought at which at least `target` of the requests meet their
SLO (DistServe's goodput), by bisection on the logarithm of the rate, anew for each seed: new arrivals, the same for
all candidates. Reported are the mean over seeds and its 95 % t-interval, and the paired difference to the best, which
says whether another one is really worse.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import msgspec

from tollbridge.errors import ConfigError
from tollbridge.sim.run import Simulation, draw_arrivals
from tollbridge.sim.scenario import GroupSpec, Scenario

TARGET = 0.9  # share of the requests that must meet their SLO
_HALVINGS = 6  # of the bracket, a factor of 2 wide: the rate is known within about 1 %
_MAX_DOUBLINGS = 12
_T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}  # two-sided


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """`num_prefill` of the workers prefer to prefill; `together`: hosts have workers of both kinds."""

    num_prefill: int
    num_decode: int
    policy: str
    together: bool = False

    @property
    def name(self) -> str:
        if not self.num_prefill:
            return f"{self.num_decode} alike, {self.policy}"
        placed = ", on shared hosts" if self.together else ""
        return f"{self.num_prefill} P : {self.num_decode} D{placed}, {self.policy}"


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Requests per second and GPU within SLO, by seed, and what they say."""

    candidate: Candidate
    name: str
    by_seed: list[float]
    mean: float
    low: float
    high: float
    behind_low: float = 0.0  # by how much it is below the best, paired by seed: the interval
    behind_high: float = 0.0

    @property
    def is_worse(self) -> bool:
        """Whether the interval of the difference to the best excludes none."""
        return self.behind_low > 0.0


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """All candidates, the best first."""

    num_gpus: int
    target: float
    seeds: list[int]
    found: list[Found]


def candidates(scenario: Scenario) -> list[Candidate]:
    """Return what may be built from the scenario's workers: no split, and every ratio under every other policy.

    Hosts with several workers can hold one kind each, or both.
    """
    number, per_host = scenario.num_workers, max(group.per_host for group in scenario.fleet)
    alike = [Candidate(num_prefill=0, num_decode=number, policy="local")]
    return alike + [
        Candidate(num_prefill=num_prefill, num_decode=number - num_prefill, policy=policy, together=together)
        for policy in scenario.policies
        if policy != "local"
        for num_prefill in _ratios(number)
        for together in ((False, True) if per_host > 1 else (False,))
    ]


def search(
    scenario: Scenario,
    seeds: Sequence[int],
    *,
    target: float = TARGET,
    progress: Callable[[str, int], None] = lambda name, seed: None,
) -> Search:
    """Return the candidates by goodput per GPU; ConfigError for a trace, whose rate is not ours to choose."""
    if scenario.workload.trace is not None:
        raise ConfigError("A search varies the arrival rate, which a trace has fixed: describe the workload instead.")
    per_gpu: dict[str, list[float]] = {}
    options = candidates(scenario)
    for seed in seeds:
        for option in options:
            progress(option.name, seed)
            rate = highest_rate(placed(scenario, option), option.policy, seed, target=target)
            per_gpu.setdefault(option.name, []).append(rate / scenario.num_workers)
    best = max(per_gpu.values(), key=statistics.fmean)
    found = [_found(option, per_gpu[option.name], best) for option in options]
    found.sort(key=lambda each: -each.mean)
    return Search(num_gpus=scenario.num_workers, target=target, seeds=list(seeds), found=found)


def placed(scenario: Scenario, option: Candidate) -> Scenario:
    """Return the scenario with its workers in the roles and places of `option`."""
    per_host = max(group.per_host for group in scenario.fleet)
    number = option.num_prefill + option.num_decode
    if not option.num_prefill:
        return msgspec.structs.replace(scenario, fleet=[GroupSpec(count=number, per_host=per_host)])
    if not option.together:
        fleet = [
            GroupSpec(count=option.num_prefill, prefer="prefill", per_host=per_host),
            GroupSpec(count=option.num_decode, prefer="decode", per_host=per_host),
        ]
        return msgspec.structs.replace(scenario, fleet=fleet)
    hosts = -(-number // per_host)  # workers are dealt out: the i-th of them sits on host i mod hosts
    fleet = [
        GroupSpec(count=1, prefer="prefill" if index < option.num_prefill else "decode", first_host=index % hosts)
        for index in range(number)
    ]
    return msgspec.structs.replace(scenario, fleet=fleet)


def highest_rate(scenario: Scenario, policy: str, seed: int, *, target: float) -> float:
    """Return the highest rate at which `target` of the requests are good; 0 when even a trickle is not."""

    def holds(rate_per_s: float) -> bool:
        return _holds(scenario, policy, seed, rate_per_s, target)

    start = scenario.workload.rate_per_s
    if holds(start):
        low, high = _bracket(holds, start, 2.0)
    else:
        high, low = _bracket(lambda rate: not holds(rate), start, 0.5)
    for _ in range(_HALVINGS if low else 0):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _bracket(holds: Callable[[float], bool], rate: float, factor: float) -> tuple[float, float]:
    """Return the last rate for which `holds`, and the next one; 0 when it holds for ever on the way down."""
    for _ in range(_MAX_DOUBLINGS):
        if not holds(rate * factor):
            return rate, rate * factor
        rate *= factor
    return (rate, rate * factor) if factor > 1.0 else (rate, 0.0)


def _holds(scenario: Scenario, policy: str, seed: int, rate_per_s: float, target: float) -> bool:
    """Return whether `target` of the requests are good; a run is over as soon as that is out of reach."""
    workload = msgspec.structs.replace(scenario.workload, rate_per_s=rate_per_s)
    at_rate = msgspec.structs.replace(scenario, workload=workload)
    arrivals = draw_arrivals(at_rate, seed)
    max_missed = int((1.0 - target) * sum(each.at_s >= scenario.warmup_s for each in arrivals))
    result = Simulation(at_rate, policy, seed=seed).run(arrivals, max_missed=max_missed)
    return not arrivals or (result.num_requests > 0 and result.good >= target)


def _ratios(number: int) -> list[int]:
    """Return numbers of prefill workers to try: all of a small fleet, about eight of a large one."""
    step = max(1, round(number / 9))
    return list(range(step, number, step))


def _found(option: Candidate, by_seed: list[float], best: list[float]) -> Found:
    mean, half = interval(by_seed)
    behind, behind_half = interval([b - own for b, own in zip(best, by_seed, strict=True)])
    is_best = by_seed is best
    return Found(
        candidate=option,
        name=option.name,
        by_seed=by_seed,
        mean=mean,
        low=mean - half,
        high=mean + half,
        behind_low=0.0 if is_best else behind - behind_half,
        behind_high=0.0 if is_best else behind + behind_half,
    )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % t-interval (infinite for one value)."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.inf
    return mean, _T95.get(len(values) - 1, 1.96) * statistics.stdev(values) / math.sqrt(len(values))
