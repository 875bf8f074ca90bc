"""What the router shows: models, health, fleet, decisions, metrics. Reads only; no prompt is ever in it."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from tollbridge.errors import ModelNotFoundError, NotFoundError, RequestError
from tollbridge.router.answers import json_answer
from tollbridge.router.context import Context
from tollbridge.router.fleet import Worker

MAX_LIMIT = 1000


def models(context: Context) -> web.Response:
    """Return the union of the ready workers' models."""
    return json_answer({"object": "list", "data": list(_cards(context).values())})


def model(context: Context, name: str) -> web.Response:
    card = _cards(context).get(name)
    if card is None:
        raise ModelNotFoundError(f"The model {name[:200]!r} is not served here: see /v1/models.", param="model")
    return json_answer(card)


def health(context: Context) -> web.Response:
    """Return 200 while at least one worker can serve, and the router takes requests."""
    draining = context.drain.has_begun
    serving = not draining and context.roster.known.is_set() and any(worker.ready for worker in context.fleet)
    workers = {
        worker.name: {"ready": worker.ready, "suspect": context.fleet.is_suspect(worker), "detail": worker.why}
        for worker in context.fleet
    }
    status = "draining" if draining else "ok" if serving else "unavailable"
    body = {"status": status, "workers": workers}
    return json_answer(body, 200 if serving else 503)


def fleet(context: Context) -> web.Response:
    """Return everything known of every worker."""
    router = context.config.router
    return json_answer(
        {
            "policy": router.policy,
            "on_no_prefill": router.on_no_prefill,
            "in_flight": context.admission.statistics().in_flight,
            "max_concurrent": router.max_concurrent,
            "cost": context.learner.cost.statistics(context.clock.monotonic()),
            "waiting": context.admission.statistics().waiting,
            "max_queue": router.max_queue,
            "receiving_bytes": context.bodies.num_bytes,
            "links": [
                {"prefill": prefill, "decode": decode, "num_transfers": number}
                for (prefill, decode), number in context.fleet.links().items()
            ],
            "discovery": context.discovery.statistics(),
            "workers": [_worker(context, worker) for worker in context.fleet],
        }
    )


def decisions(context: Context, limit: str) -> web.Response:
    """Return the newest records."""
    if not (limit.isascii() and limit.isdigit()):
        raise RequestError(f"limit must be a number from 0 to {MAX_LIMIT}.", param="limit")
    return json_answer({"decisions": context.decisions.recent(min(int(limit[:6]), MAX_LIMIT))})


def decision(context: Context, request_id: str) -> web.Response:
    record = context.decisions.maybe_get(request_id)
    if record is None:
        kept = context.limits.num_decisions
        raise NotFoundError(
            f"There is no decision {request_id[:128]!r}: it was never made, or is not among the last {kept} any more."
        )
    return json_answer(record)


def metrics(context: Context) -> web.Response:
    body = generate_latest(context.metrics.registry)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


def _cards(context: Context) -> dict[str, dict[str, Any]]:
    cards: dict[str, dict[str, Any]] = {}
    for worker in context.fleet:
        for card in worker.models if worker.ready else ():
            cards.setdefault(str(card.get("id")), card)
    return cards


def _worker(context: Context, worker: Worker) -> dict[str, Any]:
    return {
        "name": worker.name,
        "prefer": worker.config.prefer,
        "engine": worker.config.engine,
        "connector": worker.config.connector,
        "host": worker.config.host,
        "url": worker.url,
        "kv": f"{worker.kv[0]}:{worker.kv[1]}" if worker.kv else None,
        "ready": worker.ready,
        "suspect": context.fleet.is_suspect(worker),
        "detail": worker.why,
        "revision": worker.config.revision,
        "uid": worker.uid,
        "incarnation": worker.incarnation,
        "num_returns": worker.num_returns,
        "models": [card.get("id") for card in worker.models],
        "num_prefills": worker.num_prefills,
        "num_decodes": worker.num_decodes,
        "num_served": worker.num_served,
        "events": worker.events,
        "follows_events": context.feeder.listens(worker),
        "load": context.fleet.view_of(worker),
        "status": worker.status,
    }
