"""Tells the cost model what really happened, and says how far off it was.

One `Lesson` per request, from its decision to its end. What a lesson proves depends on what else went on meanwhile: a
prefill that shared its steps with another one is not taken at face value, and how many transfers shared a link is
counted rather too high than too low (`cost/link.py`).

Workers of ours report every leg. vLLM hands our connector's report on with an answer that is not streamed only, and
its own connectors report nothing: then the router's own clock has to do, which saw when prefill answered and when the
first token came.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from tollbridge.clock import Clock
from tollbridge.config.cluster import SloConfig
from tollbridge.cost.engine import DEFAULT_BUDGET
from tollbridge.cost.habits import Average
from tollbridge.cost.link import PACE, overlaps, proven
from tollbridge.cost.model import CostModel
from tollbridge.policy.pricing import Pricing
from tollbridge.router.fleet import Fleet
from tollbridge.router.metrics import RouterMetrics
from tollbridge.wire.decision import Decision, Happened
from tollbridge.wire.params import WorkerReport

TRIAL = "trial"  # reason of a split of our own
_SHARED_WEIGHT = 0.1  # of a prefill that shared its steps with another
_MIN_STEPS = 8  # of a stream, to tell what a step takes
_MAX_PREFILL_SHARE = 0.3  # of a stream's time, beyond which it says little of the steps without prefill
_BESIDE_S = (
    0.05  # HTTP, a connector's polling and a step: what else may pass between KV's last byte and the first token
)
_CACHED = 0.5  # of the time that a prefill should take: less, and it has not been one
_STALE_S = 60.0  # what proved at most how fast a link is has been too long ago
_FORGOTTEN_S = 600.0  # nobody used a link, perhaps because it once seemed slow


@dataclass
class _Engine:
    """What this router knows to be going on in one worker."""

    num_prefilling: int = 0
    num_started: int = 0
    prefilled_s: float = 0.0  # prefill that was computed there, as predicted


@dataclass
class _Nic:
    """Transfers over one network interface in one direction."""

    num_active: int = 0
    num_started: int = 0


@dataclass
class _Link:
    """When something was seen of a link, monotonic seconds."""

    used_s: float = float("-inf")
    bounded_s: float = float("-inf")  # when a transfer proved at most how fast it is


@dataclass
class _Seen:
    """Counts when a lesson began."""

    num_active: int
    num_started: int

    def overlapping(self, now: _Nic) -> int:
        return self.num_active + now.num_started - self.num_started


@dataclass
class Learner:
    """The cost model of one router and what feeds it."""

    cost: CostModel
    slo: SloConfig
    explore: float
    fleet: Fleet
    clock: Clock
    metrics: RouterMetrics
    engines: dict[str, _Engine] = field(default_factory=dict)
    nics: dict[tuple[str, str], _Nic] = field(default_factory=dict)
    links: dict[tuple[str, str], _Link] = field(default_factory=dict)  # by (from host, to host)
    begun_at_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.begun_at_s = self.clock.monotonic()

    def pricing(self) -> Pricing:
        """Return what a policy needs to price a request now."""
        return Pricing(cost=self.cost, slo=self.slo, explore=self.explore, now_s=self.clock.monotonic())

    def lesson(self, decision: Decision) -> Lesson:
        """Begin to learn from a request that was just decided."""
        return Lesson(self, decision)

    def engine(self, name: str) -> _Engine:
        return self.engines.setdefault(name, _Engine())

    def keep(self, workers: Set[str], hosts: Set[str]) -> None:
        """Forget the workers that have left, and where nobody is any more; lessons under way keep what is theirs."""
        self.engines = {name: engine for name, engine in self.engines.items() if name in workers}
        self.nics = {key: nic for key, nic in self.nics.items() if key[0] in hosts or nic.num_active}
        self.links = {pair: link for pair, link in self.links.items() if hosts >= set(pair)}
        self.cost.keep(workers, hosts)

    def wants_trial(self, source: str, target: str) -> bool:
        """Return whether nobody knows what the link carries, or only from a first transfer, which may have waited for a
        connection; whether it is in use and nothing says that it has not become slower, or has long been out of use."""
        model = self.cost.link(source, target)
        if not model.known or model.num_observations == 1:
            return True
        link = self.links.get((source, target))
        if link is None:  # as the operator stated it: perhaps of another network card, or in another unit
            return self.clock.monotonic() > self.begun_at_s + _FORGOTTEN_S
        forgotten_s = max(link.used_s, link.bounded_s) + _FORGOTTEN_S
        return link.used_s > link.bounded_s + _STALE_S or self.clock.monotonic() > forgotten_s

    def nic(self, host: str, direction: str) -> _Nic:
        return self.nics.setdefault((host, direction), _Nic())


class Lesson:
    """What one request teaches. Call `first_token` at most once and `end` exactly once."""

    def __init__(self, learner: Learner, decision: Decision) -> None:
        self._learner = learner
        self._decision = decision
        self._is_prefilling = True
        worker = decision.prefill or decision.decode
        self._workers = {name: learner.fleet[name] for name in (worker, decision.decode)}  # which may leave
        self._engine = learner.engine(worker)
        self._decode = learner.engine(decision.decode)
        self._alone = self._engine.num_prefilling == 0
        self._engine.num_prefilling += 1
        self._engine.num_started += 1
        self._started = self._engine.num_started
        self._streams = self._num_streams(worker)
        self._first: tuple[float, float] | None = None  # (streams, prefilled_s) of the decode worker at the first token
        self._begun_at_s = learner.clock.monotonic()
        self._prefilled_at_s = self._first_at_s = 0.0  # monotonic; 0: not yet
        self._overhead_s = self._overhead.value(learner.cost.local_overhead_s.value(0.0))  # that went into the price
        self._is_trial = decision.reason == TRIAL
        self._decode_started = self._decode.num_started
        self._quiet = not self._num_streams(decision.decode) and not (
            decision.prefill is not None and self._decode.num_prefilling
        )
        self._nics = self._enter_link()
        if not self._is_trial:
            self._note_arrival(worker)

    def prefill_done(self) -> None:
        """The prefill worker has answered."""
        self._prefilled_at_s = self._learner.clock.monotonic()

    def first_token(self) -> None:
        """The prompt is computed, and its KV has crossed the link."""
        self._first_at_s = self._learner.clock.monotonic()
        if self._is_prefilling:
            self._leave()
            self._engine.prefilled_s += self._decision.terms.get("prefill_s", 0.0)
            self._first = (self._num_streams(self._decision.decode), self._decode.prefilled_s)

    def end(self, happened: Happened, decision: Decision) -> Mapping[str, float]:
        """Learn; return the relative error of each prediction. A request that was retried teaches nothing."""
        if self._is_prefilling:
            self._leave()
        same = (decision.prefill, decision.decode) == (self._decision.prefill, self._decision.decode)
        if happened.status != "ok" or not same:
            return {}
        errors = {
            "prefill": self._learn_prefill(happened),
            "wire": self._learn_link(happened),
            "step": self._learn_step(happened),
            "ttft": self._ttft_error(happened),
        }
        if happened.completion_tokens:
            bound = int(decision.terms.get("max_tokens", 0.0)) or None
            self._learner.cost.output_tokens.add(happened.completion_tokens / happened.num_choices, bound)
        known = {kind: error for kind, error in errors.items() if error is not None}
        for kind, error in known.items():
            if not self._is_trial:
                self._learner.metrics.predicted(kind, error)
        return known

    def _note_arrival(self, worker: str) -> None:
        cost, terms, now_s = self._learner.cost, self._decision.terms, self._learner.clock.monotonic()
        cost.started(now_s)
        computed = terms.get("prompt_tokens", 0.0) - terms.get("cached_tokens", 0.0)
        chunk = min(computed, self._budget(worker))
        if chunk > 0 and cost.engine(worker).step_s(0, chunk) > self._learner.slo.itl_p99_s:
            cost.stalling(computed, now_s)

    def _enter_link(self) -> list[tuple[_Nic, _Seen]]:
        if self._decision.prefill is None:
            return []
        source, target = self._hosts(self._decision.prefill)
        nics = [self._learner.nic(source, "out"), self._learner.nic(target, "in")]
        seen = [_Seen(nic.num_active, nic.num_started + 1) for nic in nics]
        for nic in nics:
            nic.num_active += 1
            nic.num_started += 1
        return list(zip(nics, seen, strict=True))

    def _hosts(self, prefill: str) -> tuple[str, str]:
        return self._workers[prefill].config.host, self._workers[self._decision.decode].config.host

    def _leave(self) -> None:
        self._is_prefilling = False
        self._alone = self._alone and self._engine.num_started == self._started
        self._engine.num_prefilling -= 1
        self._sharing = 1 + max((seen.overlapping(nic) for nic, seen in self._nics), default=0)
        same = self._decode.num_started == self._decode_started
        self._quiet = self._quiet and self._alone and same and self._sharing == 1
        for nic, _ in self._nics:
            nic.num_active -= 1

    def _num_streams(self, worker: str) -> int:
        """Return how many streams of this router decode there."""
        return self._workers[worker].load.num_streams

    def _budget(self, worker: str) -> int:
        return self._workers[worker].load.report.max_num_batched_tokens or DEFAULT_BUDGET

    def _learn_prefill(self, happened: Happened) -> float | None:
        worker = self._decision.prefill or self._decision.decode
        report = happened.prefill_report if self._decision.prefill else happened.decode_report
        if report is None or report.computed_tokens <= 0 or report.prefill_s <= 0:
            if self._decision.prefill:
                return self._learn_prefill_of_split(self._decision.prefill, report)
            return self._learn_prefill_from_outside(worker, happened)
        error = self._learner.cost.own_engine(worker).observe_prefill(
            report.prefill_s,
            report.computed_tokens,
            report.cached_tokens,
            self._budget(worker),
            num_decodes=self._streams,
            weight=1.0 if self._alone else _SHARED_WEIGHT,
        )
        return error if self._alone else None

    def _learn_prefill_from_outside(self, worker: str, happened: Happened) -> float | None:
        """A worker that reports no times: the TTFT of a local request that met nobody else's prefill has to do."""
        terms = self._decision.terms
        num_tokens = happened.prompt_tokens or int(terms.get("prompt_tokens", 0.0))
        if not self._alone or happened.ttft_s is None or not num_tokens:
            return None
        overhead_s = self._learner.cost.local_overhead_s.value(0.0)
        cached = int(terms.get("cached_tokens", 0.0)) if happened.cached_tokens is None else happened.cached_tokens
        return self._learner.cost.own_engine(worker).observe_prefill(
            max(happened.ttft_s - overhead_s, 1e-4),
            max(1, num_tokens - cached),
            cached,
            self._budget(worker),
            num_decodes=self._streams,
        )

    def _learn_prefill_of_split(self, worker: str, report: WorkerReport | None) -> float | None:
        """vLLM's prefill leg tells what it computed, but not how long: the router's own clock does.

        Not of a trial, which may be the first thing that a server ever computes.
        """
        if report is None or report.computed_tokens <= 0:
            return None
        if self._is_trial or not self._alone or not self._prefilled_at_s:
            return None
        seconds = self._prefilled_at_s - self._begun_at_s - self._learner.cost.local_overhead_s.value(0.0)
        return self._learner.cost.own_engine(worker).observe_prefill(
            max(seconds, 1e-4),
            report.computed_tokens,
            report.cached_tokens,
            self._budget(worker),
            num_decodes=self._streams,
        )

    def _learn_link(self, happened: Happened) -> float | None:
        """Learn from a transfer that was accepted whole."""
        decode, prefill = happened.decode_report, happened.prefill_report
        if self._decision.prefill is None:
            return None
        if decode is None:
            return self._learn_link_from_outside(happened)
        transfer = decode.transfer
        if transfer is None or transfer.outcome != "done" or not transfer.num_tokens:
            return None
        stated = self._workers[self._decision.prefill].load.report.kv_bytes_per_token
        self._learner.cost.weighed(transfer.payload_bytes / transfer.num_tokens, stated)
        return self._observe_link(
            proven(
                transfer.payload_bytes,
                transfer.wire_s,
                num_sharing=self._sharing,
                prefill_s=(prefill.prefill_s if prefill is not None else 0.0) or self._predicted_prefill_s(),
            )
        )

    def _learn_link_from_outside(self, happened: Happened) -> float | None:
        """No report: all KV crossed between the begin of the prefill and the first token, or after the prefill.

        That is the least which the path carries. The most is known only when nothing else was going on.
        """
        if not happened.split_verified or not self._prefilled_at_s or not self._first_at_s or happened.ttft_s is None:
            return None
        terms, view = self._decision.terms, self._learner.fleet.view_of(self._workers[self._decision.prefill or ""])
        if not view.kv_bytes_per_token and view.connector == "tollbridge":
            return None  # its metrics will say what a token weighs: no guess before
        num_tokens = (happened.prompt_tokens or terms.get("prompt_tokens", 0.0)) - 1
        num_tokens -= terms.get("decode_cached_tokens", 0.0)
        num_bytes = num_tokens * self._learner.cost.kv_bytes(view.kv_bytes_per_token)
        answered_s = self._prefilled_at_s - self._begun_at_s  # with what waited before it
        after_s = max(self._first_at_s - self._prefilled_at_s, 0.0)
        predicted_s = self._predicted_prefill_s()
        is_sure = not self._is_trial and self._learner.cost.own_engine(self._decision.prefill or "").known
        if is_sure and answered_s < _CACHED * predicted_s:
            return None  # it was cached after all, and so perhaps where it was to be sent
        prefill_s = (predicted_s or answered_s) if overlaps(view.connector) else 0.0
        longest_s = (answered_s if overlaps(view.connector) else 0.0) + after_s
        interval = proven(num_bytes, longest_s, num_sharing=1, prefill_s=0.0)
        if interval is None:
            return None
        net_s = prefill_s + after_s - _BESIDE_S
        is_bounded = self._quiet and net_s > _BESIDE_S and prefill_s + after_s > PACE * prefill_s
        return self._observe_link((interval[0], max(num_bytes / net_s, interval[0]) if is_bounded else math.inf))

    def _observe_link(self, interval: tuple[float, float] | None) -> float | None:
        if interval is None or self._decision.prefill is None:
            return None
        learner, hosts = self._learner, self._hosts(self._decision.prefill)
        seen = learner.links.setdefault(hosts, _Link())
        now_s = learner.clock.monotonic()
        if not self._is_trial:
            seen.used_s = now_s
        if self._is_trial or interval[1] < math.inf or seen.bounded_s == -math.inf:
            seen.bounded_s = now_s
        link = learner.cost.link(*hosts)
        was_known = link.known
        error = link.observe(*interval)
        return error if was_known else None

    def _predicted_prefill_s(self) -> float:
        """Return what the prefill took as far as is known: of vLLM's only its length."""
        worker = self._decision.prefill or self._decision.decode
        engine, terms = self._learner.cost.engine(worker), self._decision.terms
        cached = terms.get("cached_tokens", 0.0)
        computed = terms.get("prompt_tokens", 0.0) - cached
        return engine.prefill_s(computed, cached, self._budget(worker), self._streams) if engine.known else 0.0

    def _learn_step(self, happened: Happened) -> float | None:
        if happened.num_choices > 1:  # they end one by one: nobody told when
            return None
        num_steps = happened.completion_tokens - 1
        if self._first is None or happened.ttft_s is None or happened.total_s is None or num_steps < _MIN_STEPS:
            return None
        streams, prefilled_before_s = self._first
        span_s = happened.total_s - happened.ttft_s
        prefilled_s = self._decode.prefilled_s - prefilled_before_s
        if span_s <= 0 or prefilled_s > _MAX_PREFILL_SHARE * span_s:
            return None
        streams = max(1.0, 0.5 * (streams + self._num_streams(self._decision.decode)))
        engine = self._learner.cost.own_engine(self._decision.decode)
        return engine.observe_step((span_s - prefilled_s) / num_steps, streams)

    def _ttft_error(self, happened: Happened) -> float | None:
        report, ttft_s = happened.decode_report, happened.ttft_s
        if not ttft_s:
            return None
        predicted_s = self._decision.terms.get("ttft_s")
        if report is not None and report.prefill_s > 0:
            inside_s = report.queue_s + report.prefill_s + (report.transfer.total_s if report.transfer else 0.0)
            self._overhead.add(min(max(ttft_s - inside_s, 0.0), 1.0))
        elif report is None and predicted_s is not None and self._decision.prefill and self._alone:
            self._overhead.add(min(max(ttft_s - (predicted_s - self._overhead_s), 0.0), 1.0))
        return None if predicted_s is None else (predicted_s - ttft_s) / ttft_s

    @property
    def _overhead(self) -> Average:
        """What the worker's own clock does not see: HTTP, tokenising, the router."""
        cost = self._learner.cost
        return cost.split_overhead_s if self._decision.prefill else cost.local_overhead_s
