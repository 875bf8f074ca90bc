"""Choosing one worker for a whole request, by the rules that routers commonly have. None of them splits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tollbridge.errors import UnavailableError
from tollbridge.policy.home import home_of
from tollbridge.policy.rules import Rule, least_loaded
from tollbridge.policy.views import FleetView, RequestView, WorkerView
from tollbridge.wire.decision import Decision

BYTES_PER_TOKEN = 4  # of a prompt that nobody has tokenised
PREFILL_LOAD_SCALE = 1.0  # Dynamo's default


def round_robin(request: RequestView, fleet: FleetView) -> Decision:
    """Serve on the worker that has served least: in turn, as long as all of them are ready."""
    worker = _least(fleet, lambda each: (each.num_served, each.name))
    return _alone(request, "round-robin", worker, f"It is the turn of {worker.name}.")


def least_in_flight(request: RequestView, fleet: FleetView) -> Decision:
    """Serve on the worker with the fewest of this router's requests in flight, whatever is cached where."""
    worker = least_loaded(fleet.ready(), first=None)
    return _alone(request, "least-loaded", worker, f"{worker.name} has the fewest requests in flight.")


def dynamo_kv(request: RequestView, fleet: FleetView) -> Decision:
    """Serve where Dynamo's KV router would."""
    return _cheapest(request, fleet, "dynamo-kv", weight=1.0)


def kv_aware(request: RequestView, fleet: FleetView) -> Decision:
    """Serve where the prompt costs least, to this worker and to those whose prefixes it displaces.

    A prefix that is computed on one more worker evicts as many blocks there, which somebody will have to compute again:
    so what is missing counts twice. By Dynamo's rule alone a busy worker's prefixes are soon copied to the others, and
    the caches hold fewer of them (see the claim prefix-routing).
    """
    return _cheapest(request, fleet, "kv-aware", weight=2.0)


def kv_cost(request: RequestView, worker: WorkerView, weight: float = 1.0) -> float:
    """Return the blocks to prefill there before and for this request, plus those in use and those to come.

    Dynamo 1.6, KV router: prefill_load_scale x max(0, active prefill + prompt - overlap) + active decode + incoming.
    `weight` multiplies what this prompt adds.
    """
    num_tokens = request.prompt_tokens
    prompt = request.body_bytes // BYTES_PER_TOKEN if num_tokens is None else num_tokens
    missing = max(prompt - request.cached.get(worker.name, 0), 0)
    prefill = PREFILL_LOAD_SCALE * (worker.waiting_prefill_tokens + weight * missing)
    return (prefill + worker.used_kv_tokens + weight * missing) / worker.block_size


def _cheapest(request: RequestView, fleet: FleetView, policy: str, *, weight: float) -> Decision:
    home = home_of(request, fleet.ready()) if policy == "kv-aware" else None  # Dynamo's rule is Dynamo's

    def key(worker: WorkerView) -> tuple[float, bool, int, int, str]:
        cost = kv_cost(request, worker, weight)
        return cost, worker.name != home, worker.num_in_flight, worker.num_served, worker.name

    worker = _least(fleet, key)
    cost, cached = kv_cost(request, worker, weight), request.cached.get(worker.name, 0)
    why = f"{worker.name} costs least: {cost:.1f} blocks, {cached} tokens cached."
    return _alone(request, policy, worker, why, terms={"cost_blocks": cost})


def _least(fleet: FleetView, key: Callable[[WorkerView], tuple[Any, ...]]) -> WorkerView:
    """Return the ready worker with the least key, a suspect last; UnavailableError when there is none."""
    ready = fleet.ready()
    if not ready:
        raise UnavailableError("No worker is ready: see /health for what each one says, and try again.")
    return min(ready, key=lambda worker: (worker.suspect, *key(worker)))


def _alone(
    request: RequestView, policy: str, worker: WorkerView, why: str, terms: dict[str, float] | None = None
) -> Decision:
    return Decision(
        id=request.id,
        policy=policy,
        choice="local",
        decode=worker.name,
        reason="policy",
        why=why,
        terms=terms or {},
    )


ROUTING: dict[str, Rule] = {
    "round-robin": round_robin,
    "least-loaded": least_in_flight,
    "dynamo-kv": dynamo_kv,
    "kv-aware": kv_aware,
}
