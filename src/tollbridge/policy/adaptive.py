"""The policy that prices the link: the least J over local on every worker and every pair, and why. docs/decision.md."""

from __future__ import annotations

from zlib import crc32

import msgspec

from tollbridge.policy.estimates import Candidate, Estimator, Side
from tollbridge.policy.rules import NOT_SPLIT, Partners, least_loaded, partners
from tollbridge.policy.views import FleetView, RequestView, WorkerView
from tollbridge.wire.decision import Decision

TIE = 0.02  # in requests: a split must be cheaper by so much, and by
MARGIN_SIGMAS = 0.5  # so many standard deviations of what is not known well
MAX_EACH = 8  # prefill and decode workers that are paired, those that cost least by themselves
EXPLORE_MIN_TOKENS = 64  # a smaller transfer says nothing about a link
EXPLORE_UNKNOWN = 5.0  # a link that nobody has seen is tried so much more often than one that is known
EXPLORE_GUESS = 12.5e6  # bytes/s that such a link is taken to have: what it risks is bounded
MAX_PAIRS = 24  # priced at most, in the order of what they cost at least
MAX_EXPLORED = 4  # pairs that are priced for it
EXPLORE_MAX_COST = 0.5  # in requests

_Entry = tuple[float, str, Side]  # what decoding there costs, where


def adaptive(request: RequestView, fleet: FleetView) -> Decision:
    """Return the cheapest way to serve `request`, explained. Deterministic: exploration is drawn from its id."""
    ready = fleet.ready()
    if not any(fleet.pricing.cost.engine(worker.name).known for worker in ready):
        return _unknown(request, fleet)
    estimator = Estimator(request, fleet)
    sides = {worker.name: estimator.side(worker) for worker in ready}
    with_room = [side for side in sides.values() if side.has_room]
    local = estimator.local(min(with_room or sides.values(), key=estimator.local_cost))
    veto, pairs = _pairs(request, fleet, estimator, sides)
    split = _best_split(estimator, pairs, local.cost)
    if split is not None and _pays(split, local, fleet.pricing.slo.ttft_s):
        decision = _decision(request, estimator, split, local, split, "split_pays")
        # Only here: who wants a split for another reason than its price wants it at any price.
        return msgspec.structs.replace(
            decision, terms={**decision.terms, "veto_tokens": float(estimator.veto_tokens(split))}
        )
    explored = _explore(request, estimator, pairs, local)
    if explored is not None:
        return _decision(request, estimator, explored, local, explored, "explore")
    if split is not None:
        veto = "tie" if split.cost < local.cost else "local_pays"
    return _decision(request, estimator, local, local, split, veto)


def priced(decision: Decision, request: RequestView, fleet: FleetView) -> Decision:
    """Return the decision of another rule with what it is expected to cost, as far as that is known."""
    ready = {worker.name: worker for worker in fleet.ready()}
    prefill, decode = ready.get(decision.prefill or decision.decode), ready.get(decision.decode)
    if prefill is None or decode is None or not fleet.pricing.cost.engine(prefill.name).known:
        return decision
    estimator = Estimator(request, fleet)
    local = estimator.local(estimator.side(decode))
    split = estimator.split(estimator.side(prefill), local.decode) if decision.prefill is not None else None
    if split is None and decision.prefill is not None:
        return decision  # over a link that nobody has seen
    terms = _terms(estimator, split or local, local, split)
    return msgspec.structs.replace(decision, terms={**terms, **decision.terms})


def _pairs(
    request: RequestView, fleet: FleetView, estimator: Estimator, sides: dict[str, Side]
) -> tuple[str, list[tuple[Side, Side]]]:
    """Return the pairs that may serve a split, the most promising first, and why there are none."""
    found = partners(request, fleet)
    if isinstance(found, str):
        return found, []
    senders = [sides[sender.name] for sender, _ in found]
    cheapest = sorted([(estimator.least_split_cost(side), side.view.name, side) for side in senders])[:MAX_EACH]
    orders = _decode_orders(found, sides)
    ranked: list[tuple[float, str, str, Side, Side]] = []  # names are unique: sides are never compared
    for floor, name, prefill in cheapest:
        best = orders[prefill.view.kind].best_for(prefill)
        ranked += [(floor + cost, name, decode, prefill, side) for cost, decode, side in best]
    if not ranked:
        return "no_kv_room", []
    ranked.sort()
    return "unknown_link", [(prefill, decode) for _, _, _, prefill, decode in ranked[:MAX_PAIRS]]


def _decode_orders(found: Partners, sides: dict[str, Side]) -> dict[tuple[str, str], _Order]:
    """Return by kind the sides with room for the KV.

    What two senders may send to is all of a kind's: each lacks only itself.
    """
    of: dict[tuple[str, str], list[list[WorkerView]]] = {}
    for sender, receivers in found:
        of.setdefault(sender.kind, []).append(receivers)
    orders = {}
    for kind, lists in of.items():
        names = {worker.name for receivers in lists[:2] for worker in receivers}
        orders[kind] = _Order([side for name in names if (side := sides[name]).has_room])
    return orders


class _Order:
    """The sides that may decode: the cheapest first, and the two with most of the prompt."""

    def __init__(self, sides: list[Side]) -> None:
        self._by_cost = sorted(map(_entry, sides))[: MAX_EACH + 1]
        self._by_cached = [_entry(side) for side in sorted(sides, key=_cached, reverse=True)[:2]]
        self._usual = self._best_for(None)

    def best_for(self, prefill: Side) -> list[_Entry]:
        """Return those to pair with `prefill`, which is none of them."""
        among = any(side is prefill for _, _, side in self._usual)
        return self._best_for(prefill) if among else self._usual

    def _best_for(self, prefill: Side | None) -> list[_Entry]:
        best = [entry for entry in self._by_cost if entry[2] is not prefill][:MAX_EACH]
        most_cached = next((entry for entry in self._by_cached if entry[2] is not prefill), None)
        if most_cached is not None and most_cached not in best:
            best.append(most_cached)
        return best


def _best_split(estimator: Estimator, pairs: list[tuple[Side, Side]], bound: float) -> Candidate | None:
    """Return the cheapest split over known links. Beyond `bound` one is enough: it is shown, not taken."""
    best: Candidate | None = None
    for prefill, decode in pairs:
        if best is not None:
            if estimator.least_split_cost(prefill) + decode.decode_cost >= min(best.cost, bound):
                break
            if estimator.least_pair_cost(prefill, decode) >= best.cost:
                continue
        candidate = estimator.split(prefill, decode)
        if candidate is not None and (best is None or candidate.cost < best.cost):
            best = candidate
    return best


def _pays(split: Candidate, local: Candidate, slo_s: float) -> bool:
    sigma = max(split.sigma_s, local.sigma_s)
    margin = TIE + MARGIN_SIGMAS * min(sigma, abs(split.ttft_s - local.ttft_s)) / slo_s
    return split.cost + margin < local.cost


def _explore(
    request: RequestView, estimator: Estimator, pairs: list[tuple[Side, Side]], local: Candidate
) -> Candidate | None:
    """Return a split that teaches something and risks little, for a bounded share of the requests."""
    draw = crc32(request.id.encode()) / 2**32
    if draw >= min(1.0, EXPLORE_UNKNOWN * estimator.pricing.explore):
        return None
    cost = estimator.cost
    num_priced = 0
    for prefill, decode in pairs:
        if estimator.num_tokens - decode.cached < EXPLORE_MIN_TOKENS:
            continue
        if draw >= estimator.pricing.explore and cost.link(prefill.view.host, decode.view.host).known:
            continue
        num_priced += 1
        if num_priced > MAX_EXPLORED:
            return None
        candidate = estimator.split(prefill, decode, unknown_goodput=EXPLORE_GUESS)
        if candidate is None or candidate.path is None or candidate.path.num_flows:
            continue
        in_time = candidate.ttft_s + candidate.sigma_s < estimator.pricing.slo.ttft_s
        if in_time and candidate.cost < local.cost + EXPLORE_MAX_COST:
            return candidate
    return None


def _unknown(request: RequestView, fleet: FleetView) -> Decision:
    """Nothing is known of any engine: local, which teaches it."""
    worker = least_loaded(fleet.ready(), first="decode", request=request)
    return Decision(
        id=request.id,
        policy="adaptive",
        choice="local",
        decode=worker.name,
        reason="unknown",
        why=f"Nothing is known yet of how fast these workers are: {worker.name} serves it alone, and so teaches it.",
    )


def _decision(
    request: RequestView,
    estimator: Estimator,
    chosen: Candidate,
    local: Candidate,
    split: Candidate | None,
    reason: str,
) -> Decision:
    is_split = chosen.path is not None
    return Decision(
        id=request.id,
        policy="adaptive",
        choice="split" if is_split else "local",
        decode=chosen.decode.view.name,
        prefill=chosen.prefill.view.name if is_split else None,
        reason=reason,
        why=_why(chosen, local, split, reason),
        terms=_terms(estimator, chosen, local, split),
    )


def _why(chosen: Candidate, local: Candidate, split: Candidate | None, reason: str) -> str:
    here = f"{local.ttft_s:.3g} s to the first token on {local.decode.view.name} alone, J {local.cost:.3g}"
    if split is None or split.path is None:
        return f"{NOT_SPLIT.get(reason, reason)}: {here}."
    path = split.path
    there = (
        f"{split.ttft_s:.3g} s by {split.prefill.view.name} -> {split.decode.view.name}, J {split.cost:.3g} "
        f"({path.wire_bytes / 1e6:.3g} MB at {path.goodput_bytes_per_s / 1e6:.3g} MB/s, a toll of {split.toll_s:.3g} s)"
    )
    words = {
        "split_pays": f"The split is cheaper: {there}, against {here}.",
        "explore": f"Split to learn what the link carries: {there}, against {here}.",
        "tie": f"Too close to call, so no split: {here}, against {there}.",
    }
    return words.get(reason, f"Local is cheaper: {here}, against {there}.")


def _terms(estimator: Estimator, chosen: Candidate, local: Candidate, split: Candidate | None) -> dict[str, float]:
    prefill, decode = chosen.prefill, chosen.decode
    terms: dict[str, float] = {
        "ttft_s": chosen.ttft_s,
        "ttft_sigma_s": chosen.sigma_s,
        "prompt_tokens": estimator.num_tokens,
        "output_tokens": estimator.output_tokens,
        "cached_tokens": prefill.cached,
        "wait_s": prefill.wait_s,
        "prefill_s": prefill.compute_s,
        "step_s": decode.step_s,
        "streams": prefill.num_streams,
        "slowed_s": prefill.slowed_s,
        "j_others": prefill.prefill_cost,
        "j_decode": decode.decode_cost,
        "local_ttft_s": local.ttft_s,
        "j_local": local.cost,
    }
    if split is not None and split.path is not None:
        path = split.path
        terms |= {
            "split_ttft_s": split.ttft_s,
            "j_split": split.cost,
            "toll_s": split.toll_s,
            "stall_s": split.stall_s,
            "fleet_streams": estimator.mean_streams(),
            "wire_bytes": path.wire_bytes,
            "wire_s": path.wire_s,
            "kv_arrival_s": path.arrival_s,
            "goodput_bytes_per_s": path.goodput_bytes_per_s,
            "flows": path.num_flows,
            "backlog_bytes": path.backlog_bytes,
            "decode_wait_s": split.decode.wait_s,
            "decode_cached_tokens": split.decode.cached,
            "link_spread": path.spread,
        }
    return {name: _rounded(value) for name, value in terms.items()}


def _rounded(value: float) -> float:
    return float(value) if not value or (type(value) is int and -100_000 < value < 100_000) else float(f"{value:.5g}")


def _entry(side: Side) -> _Entry:
    return side.decode_cost, side.view.name, side


def _cached(side: Side) -> tuple[int, str]:
    return side.cached, side.view.name
