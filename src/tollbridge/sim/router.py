"""One simulated router: the production fleet, load book, prefix index, cost model, lessons and policies.

What is simulated is what feeds them: a look at every worker each `report_interval_s`, KV events when a worker hands
them out, and the ends of requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tollbridge.config.calibration import Calibration, EngineCalibration, LinkCalibration
from tollbridge.config.cluster import WorkerConfig
from tollbridge.cost.model import CostModel
from tollbridge.kv.content import Content
from tollbridge.kv.index import PrefixIndex
from tollbridge.policy.decide import decide
from tollbridge.policy.pricing import Pricing
from tollbridge.policy.views import FleetView, RequestView
from tollbridge.router.decide import cached_tokens
from tollbridge.router.fleet import Fleet
from tollbridge.router.learn import Learner
from tollbridge.router.limits import Limits
from tollbridge.router.metrics import RouterMetrics
from tollbridge.router.prompt import Prompt
from tollbridge.sim.agenda import Agenda
from tollbridge.sim.scenario import Scenario
from tollbridge.sim.worker import SimWorker
from tollbridge.wire.decision import Decision
from tollbridge.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

PRICED = "adaptive"  # the policy that looks at prices; the others decide the same without
_LIMITS = Limits()


class SimRouter:
    """Decides for its part of the fleet."""

    def __init__(
        self,
        scenario: Scenario,
        policy: str,
        workers: Sequence[SimWorker],
        prefers: Sequence[str],
        agenda: Agenda,
        goodputs: dict[tuple[str, str], float],
    ) -> None:
        self.workers = {worker.name: worker for worker in workers}
        self._scenario = scenario
        self._policy = policy
        self._agenda = agenda
        configs = [
            WorkerConfig(name=worker.name, prefer=prefer, host=worker.host, url="http://simulated:1")  # type: ignore[arg-type]
            for worker, prefer in zip(workers, prefers, strict=True)
        ]
        self.fleet = Fleet(configs, clock=agenda)
        self.index = PrefixIndex(
            max_entries=_LIMITS.index_entries, max_entries_per_worker=_LIMITS.index_entries_per_worker
        )
        self.learner = Learner(
            cost=CostModel.seeded(_calibration(scenario, workers, goodputs)),
            slo=scenario.slo,
            explore=scenario.explore,
            fleet=self.fleet,
            clock=agenda,
            metrics=RouterMetrics(),
        )
        for worker in workers:
            worker.on_events = self._take_events
            self.came_back(worker)

    @property
    def is_priced(self) -> bool:
        return self._policy == PRICED

    def decide(self, request_id: str, prompt: Sequence[int], max_tokens: int) -> Decision:
        """Return where a request runs; UnavailableError when nobody can take it. As `router/decide.py`."""
        content = Content.of_tokens(prompt)
        view = self.view()
        found = self.index.match(content)
        known = Prompt(content=content, num_tokens=len(prompt), origin="ids")
        cached = cached_tokens(known, found, view)
        request = RequestView(id=request_id, prompt_tokens=len(prompt), max_tokens=max_tokens, cached=cached)
        decision = decide(request, view, self._policy)
        block_size = self._scenario.engine.block_size
        expires_s = self._agenda.now_s + _LIMITS.expect_told_s
        # who decodes a split tells of its KV when it is there
        self.index.expect(decision.prefill or decision.decode, content, block_size, expires_s=expires_s)
        facts = {
            "prompt_tokens": len(prompt),
            "max_tokens": max_tokens,
            "cached_tokens": cached.get(decision.prefill or decision.decode, 0),
            "decode_cached_tokens": cached.get(decision.decode, 0),
        }
        return msgspec.structs.replace(decision, terms=facts | decision.terms)

    def view(self) -> FleetView:
        """Return the fleet with what a policy needs to price a request."""
        pricing = self.learner.pricing() if self.is_priced else Pricing(slo=self._scenario.slo)
        return msgspec.structs.replace(self.fleet.view(None), pricing=pricing)

    def look(self) -> None:
        """Ask every worker how it is, as the health monitor does."""
        now_s = self._agenda.now_s
        for worker in self.workers.values():
            if not worker.is_up:
                continue
            known = self.fleet[worker.name]
            if worker.is_idle and known.load.is_settled:
                continue  # what it would say is known
            worker.flush_events()
            pinned, bound = worker.pinned_blocks
            known.status = {"engine": {"num_pinned_blocks": pinned, "max_pinned_blocks": bound}}
            known.load.told(worker.report(), now_s)
        self.index.expire(now_s)

    def died(self, worker: SimWorker) -> None:
        """Its connections broke, so it is known at once."""
        known = self.fleet[worker.name]
        known.ready = False
        self.fleet.failed(known)
        self.index.clear(worker.name)

    def came_back(self, worker: SimWorker) -> None:
        known = self.fleet[worker.name]
        known.ready, known.kv = True, (worker.host, 1)
        known.load.told(worker.report(), self._agenda.now_s)

    def _take_events(self, worker: str, events: list[KVEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self.index.stored(
                    worker,
                    block_hashes=event.block_hashes,
                    parent=event.parent_block_hash,
                    token_ids=event.token_ids,
                    block_size=event.block_size,
                )
            elif isinstance(event, BlockRemoved):
                self.index.removed(worker, event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                self.index.clear(worker)


def _calibration(
    scenario: Scenario, workers: Sequence[SimWorker], goodputs: dict[tuple[str, str], float]
) -> Calibration | None:
    """Return what `tollbridge probe` would have measured; None when the router is to learn it."""
    if not scenario.knows_speeds:
        return None
    engine = EngineCalibration(prefill=scenario.engine.prefill, decode=scenario.engine.decode)
    return Calibration(
        engines={worker.name: engine for worker in workers},
        links={f"{a}>{b}": LinkCalibration(goodput_bytes_per_s=value) for (a, b), value in goodputs.items()},
    )
