"""The router's state -> Snapshot. Reads only; the cost is bounded by what the router remembers, not by its load."""

from __future__ import annotations

from collections.abc import Sequence

from tollbridge.router.context import Context
from tollbridge.ui.alerts import alerts
from tollbridge.ui.breakeven import Ground, break_even
from tollbridge.ui.fleet import link_rows, worker_row
from tollbridge.ui.requests import ended, row, window
from tollbridge.ui.snapshot import VERSION, Bound, BreakEven, History, LinkRow, Snapshot, WorkerRow
from tollbridge.ui.totals import biases, totals

MAX_RECORDS = 1024  # looked at for one snapshot
MAX_ACTIVE = 48  # shown one by one
MAX_RECENT = 40
MAX_HISTORY = 400


def observe(context: Context, *, started_at: float, rss_bytes: int = 0, memory_limit_bytes: int = 0) -> Snapshot:
    """Return everything that the page shows, now."""
    now, slo = context.clock.wall(), context.config.slo
    records = context.decisions.recent(MAX_RECORDS)
    done = ended(records)
    statistics = context.decisions.statistics()
    workers = [worker_row(worker, context.fleet.view_of(worker)) for worker in context.fleet]
    cost = context.learner.cost.statistics(context.clock.monotonic())
    goodputs = {pair: link.goodput_bytes_per_s for pair, link in cost.links.items()}
    links = link_rows(workers, context.fleet.links(), goodputs, done, now)
    recent = [row(record, slo) for record in done[:MAX_RECENT]]
    is_whole = statistics.recorded_total <= min(statistics.bound, MAX_RECORDS)
    lately = window(done, slo, now, is_whole=is_whole)
    admitted = context.admission.statistics()
    return Snapshot(
        v=VERSION,
        at=now,
        started_at=started_at,
        model=context.config.model,
        policy=context.config.router.policy,
        explore=context.config.router.explore,
        slo_ttft_s=slo.ttft_s,
        slo_tpot_s=slo.tpot_s,
        slo_itl_s=slo.itl_p99_s,
        in_flight=admitted.in_flight,
        waiting=admitted.waiting,
        arrivals_per_s=cost.arrivals_per_s,
        workers=workers,
        links=links,
        window=lately,
        totals=totals(context.metrics),
        break_even=_break_even(context, workers, links),
        bounds=_bounds(context, rss_bytes, memory_limit_bytes),
        alerts=alerts(
            workers=workers,
            links=links,
            recent=recent,
            window=lately,
            waiting=admitted.waiting,
            discovery_error=context.discovery.statistics().error,
            policy=context.config.router.policy,
            slo_ttft_s=slo.ttft_s,
            slo_tpot_s=slo.tpot_s,
            now=now,
        ),
        active=[row(each, slo) for each in reversed(records) if each.happened.status == "running"][:MAX_ACTIVE],
        recent=recent,
        bias=biases(context.metrics),
    )


def history(context: Context) -> History:
    """Return the requests that ended before a viewer came."""
    slo = context.config.slo
    newest = ended(context.decisions.recent(MAX_RECORDS))[:MAX_HISTORY]
    return History(v=VERSION, at=context.clock.wall(), rows=[row(each, slo) for each in reversed(newest)])


def _break_even(context: Context, workers: Sequence[WorkerRow], links: Sequence[LinkRow]) -> BreakEven | None:
    """Return the curves of the busiest pair of which engine, link and KV size are known."""
    cost, sizes = context.learner.cost, {worker.name: worker for worker in workers}
    for link in links:
        sender, receiver = cost.engine(link.prefill), cost.engine(link.decode)
        view = context.fleet.view_of(context.fleet[link.prefill])
        per_token = cost.kv_bytes(view.kv_bytes_per_token)
        if link.goodput_bytes_per_s and sender.known and per_token and link.prefill in sizes:
            return break_even(
                Ground(
                    prefill=link.prefill,
                    decode=link.decode,
                    sender=sender,
                    receiver=receiver,
                    budget=view.max_num_batched_tokens,
                    goodput_bytes_per_s=link.goodput_bytes_per_s,
                    bytes_per_token=per_token,
                    overhead_s=cost.split_overhead_s.value(cost.local_overhead_s.value(0.0)),
                )
            )
    return None


def _bounds(context: Context, rss_bytes: int, memory_limit_bytes: int) -> list[Bound]:
    """Return what of the router is bounded, and how much of it is used."""
    router, limits, index = context.config.router, context.limits, context.feeder.index.statistics()
    admitted = context.admission.statistics()
    used = [
        Bound(name="requests in flight", used=admitted.in_flight, limit=router.max_concurrent, unit="requests"),
        Bound(name="requests waiting", used=admitted.waiting, limit=router.max_queue, unit="requests"),
        Bound(name="bodies arriving", used=context.bodies.num_bytes, limit=limits.max_bodies_bytes, unit="bytes"),
        Bound(name="prefix index", used=index.num_held + index.num_expected, limit=limits.index_entries, unit="blocks"),
    ]
    if rss_bytes and memory_limit_bytes:
        used.append(Bound(name="router memory", used=rss_bytes, limit=memory_limit_bytes, unit="bytes"))
    return used
