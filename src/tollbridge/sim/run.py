"""Builds a fleet, lets the arrivals loose on it, and returns what came out: once per policy, on the same arrivals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random

import msgspec

from tollbridge.errors import ConfigError
from tollbridge.policy import registry
from tollbridge.sim.agenda import Agenda
from tollbridge.sim.arrivals import Arrival, offered_tokens, synthetic
from tollbridge.sim.flow import Flow
from tollbridge.sim.network import Network
from tollbridge.sim.results import DEFINITIONS, PolicyResult, Record, Tally
from tollbridge.sim.router import SimRouter
from tollbridge.sim.scenario import FailureSpec, Scenario
from tollbridge.sim.topology import Topology
from tollbridge.sim.transfer import Transfer
from tollbridge.sim.worker import SimWorker


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Several policies on the same arrivals."""

    seed: int
    num_workers: int
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    scenario: Scenario
    policies: list[PolicyResult]
    definitions: str = DEFINITIONS


def draw_arrivals(scenario: Scenario, seed: int) -> list[Arrival]:
    """Return synthetic arrivals; the same seed gives the same ones."""
    return synthetic(scenario.workload, scenario.duration_s, Random(f"arrivals {seed}"))


def compare(
    scenario: Scenario,
    arrivals: Sequence[Arrival],
    *,
    seed: int,
    fast: bool = True,
    progress: Callable[[str, int], None] = lambda policy, ended: None,
) -> Comparison:
    """Return every policy of the scenario on these arrivals; ConfigError for an unknown policy or a prompt that no
    worker could hold."""
    for policy in scenario.policies:
        registry.find(policy)
    _check_fit(scenario, arrivals)
    prompt_tokens, output_tokens = offered_tokens(arrivals)
    return Comparison(
        seed=seed,
        num_workers=scenario.num_workers,
        num_requests=len(arrivals),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        scenario=scenario,
        policies=[
            Simulation(scenario, policy, seed=seed, fast=fast).run(arrivals, progress=partial(progress, policy))
            for policy in scenario.policies
        ],
    )


class Simulation:
    """One policy. Use once: `run`."""

    def __init__(self, scenario: Scenario, policy: str, *, seed: int, fast: bool = True) -> None:
        self._scenario = scenario
        self._policy = policy
        self.agenda = Agenda()
        self._topology = Topology(scenario)
        self.network = Network(self.agenda, self._topology.capacities)
        self.workers = [
            SimWorker(
                name, host, scenario.engine, self.agenda, kv_bytes_per_token=scenario.kv_bytes_per_token, fast=fast
            )
            for name, host in self._topology.hosts.items()
        ]
        self.routers = [self._router(index) for index in range(scenario.routers)]
        self._by_name = {worker.name: worker for worker in self.workers}
        self._failures = [*scenario.failures, *self._random_failures(Random(f"failures {seed}"))]
        self._tally = Tally(scenario.slo, warmup_s=scenario.warmup_s)
        self._arrivals: Sequence[Arrival] = ()
        self._next = 0
        self._progress: Callable[[int], None] = lambda ended: None
        self.on_record: Callable[[int, Record], None] = lambda index, record: None

    def run(
        self,
        arrivals: Sequence[Arrival],
        *,
        progress: Callable[[int], None] | None = None,
        max_missed: int | None = None,
    ) -> PolicyResult:
        """Serve all arrivals to their end, or until more than `max_missed` of them have missed their SLO."""
        self._arrivals = arrivals
        self._progress = progress or self._progress
        for failure in self._failures:
            self.agenda.at(failure.at_s, partial(self._die, self._by_name[failure.worker], failure.down_s))
        for router in self.routers:
            self._look(router)
        self._plan_arrival()
        tally, bound = self._tally, len(arrivals) if max_missed is None else max_missed
        self.agenda.run(until=lambda: tally.num_ended >= len(arrivals) or tally.num_missed > bound)
        span_s = max(self._scenario.duration_s, arrivals[-1].at_s if arrivals else 0.0) - self._scenario.warmup_s
        return self._tally.result(
            self._policy,
            span_s=span_s,
            num_gpus=len(self.workers),
            preemptions=sum(worker.preemptions_total for worker in self.workers),
            now_s=self.agenda.now_s,
        )

    def check(self) -> None:
        """Raise AssertionError when an invariant of a worker, a link, an index or a fleet is broken."""
        for worker in self.workers:
            worker.check()
        for router in self.routers:
            router.fleet.check()
        self.network.check()

    def _router(self, index: int) -> SimRouter:
        """Return the router of every so-manieth worker."""
        mine = self.workers[index :: self._scenario.routers]
        prefers = [self._topology.prefers[worker.name] for worker in mine]
        return SimRouter(
            self._scenario, self._policy, mine, prefers, self.agenda, self._topology.goodputs([w.host for w in mine])
        )

    def _plan_arrival(self) -> None:
        if self._next < len(self._arrivals):
            self.agenda.at(self._arrivals[self._next].at_s, self._arrive)

    def _arrive(self) -> None:
        index, self._next = self._next, self._next + 1
        router = self.routers[index % len(self.routers)]
        flow = Flow(
            f"r{index}",
            self._arrivals[index],
            router,
            self.agenda,
            overhead=self._scenario.overhead,
            make_transfer=self._make_transfer,
            on_end=lambda record: self._ended(index, record),
            block_size=self._scenario.engine.block_size,
        )
        self._plan_arrival()
        flow.start()

    def _ended(self, index: int, record: Record) -> None:
        self._tally.add(record)
        self.on_record(index, record)
        self._progress(self._tally.num_ended)

    def _make_transfer(self, prefill: str, decode: str, on_end: Callable[[bool], None]) -> Transfer:
        hosts = self._topology.hosts
        return Transfer(
            self.agenda,
            self.network,
            self._topology.path(hosts[prefill], hosts[decode]),
            line=(prefill, decode),
            bytes_per_token=self._scenario.kv_bytes_per_token,
            latency_s=self._scenario.network.latency_s,
            on_end=on_end,
        )

    def _look(self, router: SimRouter) -> None:
        router.look()
        self.agenda.at(self.agenda.now_s + self._scenario.report_interval_s, lambda: self._look(router))

    # --- failures

    def _random_failures(self, rng: Random) -> list[FailureSpec]:
        spec, found = self._scenario.random_failures, []
        for worker in self.workers if spec is not None else ():
            assert spec is not None
            at_s = rng.expovariate(1.0 / spec.mean_s)
            while at_s < self._scenario.duration_s:
                found.append(FailureSpec(worker=worker.name, at_s=at_s, down_s=spec.down_s))
                at_s += spec.down_s + rng.expovariate(1.0 / spec.mean_s)
        return found

    def _die(self, worker: SimWorker, down_s: float) -> None:
        if not worker.is_up:
            return
        router = next(router for router in self.routers if worker.name in router.workers)
        lost = worker.die()
        router.died(worker)
        for job in lost:
            job.listener.failed(job)
        self.agenda.at(self.agenda.now_s + down_s, lambda: self._come_back(worker, router))

    def _come_back(self, worker: SimWorker, router: SimRouter) -> None:
        worker.come_back()
        router.came_back(worker)


def _check_fit(scenario: Scenario, arrivals: Sequence[Arrival]) -> None:
    longest = max((each.num_prompt + each.num_output for each in arrivals), default=0)
    if longest > scenario.engine.kv_cache_tokens:
        raise ConfigError(
            f"A request has {longest} tokens, prompt and output together, but engine.kv_cache_tokens is "
            f"{scenario.engine.kv_cache_tokens}: raise it, or bound the lengths.",
            param="engine",
        )
