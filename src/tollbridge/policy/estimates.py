"""What serving one request costs on each worker and over each path: the terms of J, before anybody compares them.

All costs are in requests: 1 is a request at the edge of its SLO, or one that is lost. docs/decision.md has the
formulas.
"""

from __future__ import annotations

import math

import msgspec

from tollbridge.cost.engine import DEFAULT_BUDGET, EngineModel, num_steps
from tollbridge.cost.link import overlaps
from tollbridge.cost.model import DEFAULT_OUTPUT_TOKENS, CostModel
from tollbridge.cost.toll import PIECES_PER_CHUNK, last_arrival_closed_s
from tollbridge.policy.home import home_of
from tollbridge.policy.pricing import Pricing
from tollbridge.policy.views import FleetView, RequestView, WorkerView, prompt_tokens

MISS = 1.5  # what a broken SLO costs, ours or another's: more than any delay within it
KV_PRICE = 0.05  # of a worker's whole free KV for as long as the TTFT SLO
SUSPECT = 10.0  # a worker that has just failed comes last, but it comes
AFFINITY = 0.05  # what a session's own worker is worth beyond its prefix cache
WELL_WITHIN = 0.75  # of the TTFT SLO: what a split may take for long prompts to be left to the prefill workers
SPARE = 0.6  # of the prefill workers' time: what the prefill of all long prompts may take if none is split
_ANY = 1e9  # seconds
_ROUNDING = 1e-9  # of sums in another order
_SAMPLE = 8  # workers of each kind whose links are looked at for that
PREFERENCE = 0.01  # what `prefer: decode` is worth to who decodes there: it decides ties; and
PREFERENCE_STALLS = 0.2  # the same while prompts come that stop streams, or nobody can know: fewer than
COLD_REQUESTS = 10  # have ended; of an answer with fewer gaps than
STREAM_GAPS = 8  # in proportion: it is soon gone
NEWCOMERS = 0.5  # of those who arrive where a prefill stops streams: the others find another worker


class Side(msgspec.Struct, frozen=True, gc=False):
    """One worker, asked to prefill or to decode this request."""

    view: WorkerView
    cached: int  # h
    computed: int  # n - h
    budget: int
    wait_s: float  # W: the work queued before it
    compute_s: float  # T(n - h, h)
    spread: float  # relative, of wait and compute
    step_s: float  # s(R + 1, 0)
    slowed_s: float  # delta of each stream that decodes here
    prefill_cost: float  # what prefilling here costs others
    decode_cost: float  # what decoding here costs, ours and others
    has_room: bool  # for the KV of prompt and output
    num_streams: int  # that decode here now; a prefill leg is none


class Path(msgspec.Struct, frozen=True, gc=False):
    """The KV's way of one split."""

    wire_bytes: float
    goodput_bytes_per_s: float  # alone on the link
    backlog_bytes: float  # of others, still to go when ours begins
    num_flows: int
    wire_s: float  # alone
    arrival_s: float  # f_K
    known: bool
    spread: float


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """One way to serve the request, priced."""

    prefill: Side
    decode: Side  # the same as prefill for a local one
    path: Path | None
    ttft_s: float
    sigma_s: float
    cost: float  # J

    @property
    def toll_s(self) -> float:
        """What the split adds to its own prefill."""
        return self.ttft_s - self.prefill.wait_s - self.prefill.compute_s

    @property
    def stall_s(self) -> float:
        """How long each stream beside it would stand still if the decode worker did it alone."""
        side = self.decode
        return max(side.compute_s - num_steps(side.computed, side.budget) * side.step_s, 0.0)


class Estimator:
    """Prices candidates of one request. Sides are computed once each."""

    def __init__(self, request: RequestView, fleet: FleetView) -> None:
        self.pricing: Pricing = fleet.pricing
        self.cost: CostModel = fleet.pricing.cost
        self._cached = request.cached
        self._fleet = fleet
        self.num_tokens = max(1, prompt_tokens(request))
        self.usual_output = max(1.0, self.cost.output_tokens.value(DEFAULT_OUTPUT_TOKENS))
        self.output_tokens = max(1.0, self.cost.output_tokens.expected(request.max_tokens, DEFAULT_OUTPUT_TOKENS))
        self._own_weight = min(4.0, max(0.25, 2.0**-request.priority))
        self._ttft_slo_s, self._tpot_slo_s = self.pricing.slo.ttft_s, self.pricing.slo.tpot_s
        self._home = home_of(request, (worker for worker in fleet.ready() if worker.prefer != "prefill"))
        now_s = self.pricing.now_s
        self._arrivals_per_s = self.cost.arrivals.per_s(now_s) / max(1, len(fleet.workers))
        self._local_overhead_s = self.cost.local_overhead_s.value(0.0)
        self._split_overhead_s = self.cost.split_overhead_s.value(self._local_overhead_s)
        self._nics = _nics(fleet)
        self._stalls_per_s = _stalls(fleet)
        elsewhere = 0 < len(self._stalls_per_s) < len(fleet.ready())
        expects_stalls = elsewhere or self.cost.output_tokens.num_values < COLD_REQUESTS
        stalls = PREFERENCE_STALLS * min(1.0, (self.output_tokens - 1.0) / STREAM_GAPS) if expects_stalls else 0.0
        self._preference = max(PREFERENCE, stalls)

    def side(self, worker: WorkerView) -> Side:
        """Return what `worker` would have to do, and what that does to others."""
        engine = self.cost.engine(worker.name)
        running = worker.num_running - worker.num_prefills  # what decodes; a prefill leg is no stream
        running = running if running > 0 else 0
        waiting, budget = worker.waiting_prefill_tokens, worker.max_num_batched_tokens or DEFAULT_BUDGET
        cached = self._cached.get(worker.name, 0)
        cached = cached if cached < self.num_tokens else self.num_tokens - 1
        computed = self.num_tokens - cached
        compute_s = engine.prefill_s(computed, cached, budget, running)
        step_s = engine.delta_s + engine.rho_s * running
        wait_s = engine.prefill_s(waiting, 0.0, budget, running) if waiting else 0.0
        if running or waiting:
            wait_s += 0.5 * step_s  # of the step that is being computed
        prefill_cost = self._arrivals_per_s * compute_s * (wait_s + 0.5 * compute_s) / self._ttft_slo_s
        chunk = min(computed, budget)
        breaks = engine.step_s(running, chunk, self.num_tokens - chunk) > self.pricing.slo.itl_p99_s
        if breaks and self._stalls_per_s and worker.name not in self._stalls_per_s:
            prefill_cost += MISS * NEWCOMERS * self._arrivals_per_s * compute_s
        slowed_s = 0.0
        if running:
            slowed_s = max(0.0, compute_s - num_steps(computed, budget) * step_s)
            prefill_cost += running * slowed_s / self.usual_output / self._tpot_slo_s
            if breaks:
                prefill_cost += MISS * self._newly_broken(engine, running, waiting, budget)
        own_step_s = step_s + engine.rho_s
        tokens, free = self.num_tokens + self.output_tokens, worker.free_kv_tokens
        return Side(
            worker,
            cached,
            computed,
            budget,
            wait_s,
            compute_s,
            engine.prefill_spread,
            own_step_s,
            slowed_s,
            prefill_cost,
            self._decode_cost(worker, own_step_s, 2 * running * engine.rho_s, tokens),
            free is None or free >= tokens,
            running,
        )

    def _newly_broken(self, engine: EngineModel, running: int, waiting: int, budget: int) -> float:
        """Return how many streams a prefill that breaks gaps breaks: not those that one before it breaks anyway."""
        chunk = min(waiting, budget)
        if not waiting or engine.step_s(running, chunk, waiting - chunk) <= self.pricing.slo.itl_p99_s:
            return running
        usual = max(1.0, self.cost.stall_tokens.value(float(waiting)))
        return min(float(running), max(1.0, waiting / usual))

    def _decode_cost(self, worker: WorkerView, step_s: float, slower_s: float, tokens: float) -> float:
        """Return what one more stream costs: `slower_s` is what it slows the others by, and they it."""
        hold_s = self.output_tokens * step_s
        cost = slower_s / self._tpot_slo_s
        if step_s > self._tpot_slo_s:
            cost += MISS
        if stalls_per_s := self._stalls_per_s.get(worker.name):
            cost += MISS * (1.0 - math.exp(-stalls_per_s * hold_s))
        if free := worker.free_kv_tokens:
            cost += KV_PRICE * tokens / (free if free > tokens else tokens) * hold_s / self._ttft_slo_s
        if worker.suspect:
            cost += SUSPECT
        if worker.name == self._home:
            cost -= AFFINITY
        return cost - self._preference if worker.prefer == "decode" else cost

    def mean_streams(self) -> float:
        """Return the streams that decode on a worker of this fleet, on average."""
        ready = self._fleet.ready()
        return sum(max(0, worker.num_running - worker.num_prefills) for worker in ready) / max(1, len(ready))

    def local(self, side: Side) -> Candidate:
        ttft_s = side.wait_s + side.compute_s + self._local_overhead_s
        return Candidate(side, side, None, ttft_s, side.spread * (side.wait_s + side.compute_s), self.local_cost(side))

    def local_cost(self, side: Side) -> float:
        alone_s = side.wait_s + side.compute_s
        own = self._own(alone_s + self._local_overhead_s, side.spread * alone_s)
        return own + side.prefill_cost + side.decode_cost

    def least_split_cost(self, prefill: Side) -> float:
        """Return what no split with this prefill side can cost less than, its decode side's cost aside."""
        return self._own_weight * (prefill.wait_s + prefill.compute_s) / self.pricing.slo.ttft_s + prefill.prefill_cost

    def least_pair_cost(self, prefill: Side, decode: Side) -> float:
        """Return what the split of this pair cannot cost less than, over whatever link. Cheaper than its price."""
        own_s = prefill.wait_s + prefill.compute_s
        ready_s = own_s if own_s > decode.wait_s else decode.wait_s
        ttft_s = ready_s + decode.step_s + self._split_overhead_s
        # What is not known of the link makes a late one less certain to be late, at best by half.
        sigma_s = prefill.spread * own_s if ttft_s < self._ttft_slo_s else _ANY
        return self._own(ttft_s, sigma_s) + prefill.prefill_cost + decode.decode_cost - _ROUNDING

    def split(self, prefill: Side, decode: Side, *, unknown_goodput: float | None = None) -> Candidate | None:
        """Return the price of prefill -> decode; None over a link that nobody has seen, unless a guess is given."""
        path = self._path(prefill, decode, unknown_goodput)
        if path is None:
            return None
        ready_s = max(prefill.wait_s + prefill.compute_s, path.arrival_s, decode.wait_s)
        ttft_s = ready_s + decode.step_s + self._split_overhead_s
        sigma_s = math.hypot(
            prefill.spread * (prefill.wait_s + prefill.compute_s),
            path.spread * (path.arrival_s - _begins_s(prefill) if path.arrival_s >= ready_s else 0.0),
        )
        slowed = path.num_flows * min(
            path.wire_s, path.backlog_bytes / path.goodput_bytes_per_s / max(1, path.num_flows)
        )
        cost = (
            self._own(ttft_s, sigma_s)
            + prefill.prefill_cost
            + decode.decode_cost
            + slowed / self.pricing.slo.ttft_s
            + (SUSPECT if prefill.view.suspect else 0.0)
        )
        return Candidate(prefill, decode, path, ttft_s, sigma_s, cost)

    def veto_tokens(self, split: Candidate) -> int:
        """Return how few tokens decode may lack for computing them to be no later than the split, and to stop nobody.

        What decode has cached is a hint here; it knows better when the request arrives.
        """
        decode, slo = split.decode, self.pricing.slo
        engine, running = self.cost.engine(decode.view.name), max(0, decode.view.num_running)
        most = min(split.ttft_s - decode.wait_s, slo.itl_p99_s)
        low, high = 0, min(decode.budget, self.num_tokens - 1)
        while low < high:
            middle = (low + high + 1) // 2
            if engine.step_s(running, middle, self.num_tokens - middle) <= most:
                low = middle
            else:
                high = middle - 1
        return low

    def _own(self, ttft_s: float, sigma_s: float) -> float:
        """Return what the request itself feels: its TTFT, and the risk that it is too late."""
        slo_s = self.pricing.slo.ttft_s
        sigma_s = max(sigma_s, 0.02 * slo_s)
        if ttft_s + sigma_s <= slo_s:
            return self._own_weight * ttft_s / slo_s
        risk = min(1.0, (ttft_s - slo_s + sigma_s) / (2.0 * sigma_s))
        return self._own_weight * (ttft_s / slo_s + MISS * risk)

    def _path(self, prefill: Side, decode: Side, unknown_goodput: float | None) -> Path | None:
        link = self.cost.link(prefill.view.host, decode.view.host)
        goodput = link.goodput_bytes_per_s or unknown_goodput
        if not goodput:
            return None
        kappa = self.cost.kv_bytes(prefill.view.kv_bytes_per_token)
        from_cache = max(0, min(prefill.cached, self.num_tokens - 1) - decode.cached)
        shipped = max(0, self.num_tokens - 1 - decode.cached)
        wire_bytes = kappa * shipped
        num_flows, queued_bytes = self._sharing(prefill.view.host, decode.view.host, wire_bytes)
        backlog_bytes = max(0.0, min(queued_bytes, num_flows * wire_bytes) - goodput * _begins_s(prefill))
        useless = max(0, decode.cached - prefill.cached)  # computed first, and decode has it
        if overlaps(prefill.view.connector):
            crossed_s = last_arrival_closed_s(
                kappa * (shipped - from_cache),
                goodput,
                compute_s=prefill.compute_s,
                num_pieces=PIECES_PER_CHUNK * num_steps(prefill.computed, prefill.budget),
                ready_bytes=kappa * from_cache + backlog_bytes,
                idle_s=prefill.compute_s * useless / prefill.computed,
            )
        else:
            crossed_s = (wire_bytes + backlog_bytes) / goodput
        arrival_s = _begins_s(prefill) + crossed_s
        return Path(
            wire_bytes, goodput, backlog_bytes, num_flows, wire_bytes / goodput, arrival_s, link.known, link.spread
        )

    def _sharing(self, source: str, target: str, wire_bytes: float) -> tuple[int, float]:
        """Return the transfers that share the busier of both NICs, and their bytes still to go."""
        out, into = self._nics.get((source, "out"), (0, 0.0)), self._nics.get((target, "in"), (0, 0.0))
        num_flows, queued = max(out, into)
        return num_flows, queued or num_flows * wire_bytes


def _begins_s(prefill: Side) -> float:
    """Return when the first KV can leave."""
    return prefill.wait_s if overlaps(prefill.view.connector) else prefill.wait_s + prefill.compute_s


def _stalls(fleet: FleetView) -> dict[str, float]:
    """Return how often a prefill that breaks the gaps of streams is to be expected, by worker.

    They belong on the prefill workers, and who decodes there must expect them, if the usual one can be split in time,
    or if the prefill workers have the time to serve all of them alone. Otherwise they come everywhere. This is what
    keeps short requests off prefill workers, and so leaves these free of streams that the next long prompt would
    stop.
    """
    cost, now_s = fleet.pricing.cost, fleet.pricing.now_s
    rate = cost.stalls.per_s(now_s)
    if not rate:
        return {}
    ready = fleet.ready()
    senders = [worker for worker in ready if worker.prefer == "prefill" and worker.can_send]
    targets = senders if senders and _take_long_prompts(senders, ready, rate, fleet.pricing) else ready
    return {worker.name: rate / len(targets) for worker in targets}


def _take_long_prompts(senders: list[WorkerView], ready: list[WorkerView], rate: float, pricing: Pricing) -> bool:
    cost, sender = pricing.cost, senders[0]
    engine, budget = cost.engine(sender.name), sender.max_num_batched_tokens or DEFAULT_BUDGET
    num_tokens = cost.stall_tokens.value(0.0)
    compute_s = engine.prefill_s(num_tokens, 0.0, budget)
    if rate * compute_s / len(senders) < SPARE:
        return True
    patience_s = WELL_WITHIN * pricing.slo.ttft_s
    if compute_s >= patience_s:
        return False
    wire_bytes = num_tokens * cost.kv_bytes(sender.kv_bytes_per_token)
    num_pieces = PIECES_PER_CHUNK * num_steps(num_tokens, budget)
    receivers = [worker.host for worker in ready if worker.prefer != "prefill"]
    links = cost.goodputs([worker.host for worker in senders[:_SAMPLE]], receivers[:_SAMPLE])
    if not overlaps(sender.connector):
        return any(compute_s + wire_bytes / goodput < patience_s for goodput in links)
    return any(  # the first does, mostly
        last_arrival_closed_s(wire_bytes, goodput, compute_s=compute_s, num_pieces=num_pieces) < patience_s
        for goodput in links
    )


def _nics(fleet: FleetView) -> dict[tuple[str, str], tuple[int, float]]:
    """Return (transfers in flight, bytes to go) by (host, direction): workers of one host share its NIC."""
    nics: dict[tuple[str, str], tuple[int, float]] = {}
    for worker in fleet.workers:
        for direction, num, size in (
            ("out", worker.num_sending, worker.sending_bytes),
            ("in", worker.num_receiving, worker.receiving_bytes),
        ):
            if num:
                before = nics.get((worker.host, direction), (0, 0.0))
                nics[worker.host, direction] = (before[0] + num, before[1] + size)
    return nics
