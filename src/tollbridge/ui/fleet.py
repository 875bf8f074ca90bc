"""The router's workers and links -> rows. Pure: reads, changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from tollbridge.policy.views import WorkerView
from tollbridge.router.fleet import Worker
from tollbridge.ui.requests import WINDOW_S, ended_at
from tollbridge.ui.snapshot import LinkRow, Transfers, WorkerRow
from tollbridge.wire.decision import DecisionRecord

MAX_LINKS = 64
MAX_EACH = 8  # workers of a side whose links are listed although nothing is on them


class _Engine(msgspec.Struct, frozen=True):
    num_blocks: int = 0
    max_pinned_blocks: int = 0
    prefix_cache_queries_total: int = 0
    prefix_cache_hits_total: int = 0


class _Side(msgspec.Struct, frozen=True):
    active: int = 0
    done: int = 0
    cancelled: int = 0
    failures_by_reason: dict[str, int] = {}
    payload_bytes_by_medium: dict[str, int] = {}
    goodput_bytes_per_s: float = 0.0


class _Status(msgspec.Struct, frozen=True):
    engine: _Engine = _Engine()
    transfer: dict[str, _Side] = {}
    rss_bytes: int = 0
    memory_limit_bytes: int = 0


def worker_row(worker: Worker, view: WorkerView) -> WorkerRow:
    """Return one worker: what the router knows of it, and what it said about itself."""
    said = _said(worker.status)
    report = worker.load.report
    total = report.total_kv_tokens or 0
    return WorkerRow(
        name=worker.name,
        prefer=view.prefer,
        engine=worker.config.engine,
        host=view.host,
        ready=worker.ready,
        suspect=view.suspect,
        detail=worker.why,
        can_send=worker.kv is not None or view.connector != "tollbridge",
        num_prefills=view.num_prefills,
        num_decodes=view.num_decodes,
        num_served=view.num_served,
        num_running=view.num_running,
        waiting_prefill_tokens=view.waiting_prefill_tokens,
        kv_total_tokens=total,
        kv_used_tokens=min(view.used_kv_tokens, total),
        pinned_tokens=view.pinned_tokens,
        max_pinned_tokens=said.engine.max_pinned_blocks * view.block_size,
        pinned_full=view.pinned_full,
        cache_queried_tokens=said.engine.prefix_cache_queries_total,
        cache_hit_tokens=said.engine.prefix_cache_hits_total,
        rss_bytes=said.rss_bytes,
        memory_limit_bytes=said.memory_limit_bytes,
        send=_transfers(said.transfer.get("send", _Side())),
        receive=_transfers(said.transfer.get("receive", _Side())),
    )


def link_rows(
    workers: Sequence[WorkerRow],
    active: Mapping[tuple[str, str], int],
    goodputs: Mapping[str, float],
    newest_first: Iterable[DecisionRecord],
    now: float,
) -> list[LinkRow]:
    """Return the ways from prefill to decode workers that are ready, and what is on them, the busiest first.

    `active` is transfers under way by (prefill, decode), `goodputs` bytes/s by "host>host".
    """
    crossed = _crossed(newest_first, now)
    hosts = {worker.name: worker.host for worker in workers}
    senders = [worker.name for worker in workers if worker.ready and worker.can_send and worker.prefer != "decode"]
    receivers = [worker.name for worker in workers if worker.ready and worker.prefer != "prefill"]
    pairs = {(p, d): None for p in senders[:MAX_EACH] for d in receivers[:MAX_EACH] if p != d}
    rows = [
        _link(pair, active.get(pair, 0), goodputs.get(f"{hosts[pair[0]]}>{hosts[pair[1]]}"), crossed.get(pair, 0.0))
        for pair in pairs | dict.fromkeys([*active, *crossed])
        if pair[0] in hosts and pair[1] in hosts
    ]
    rows.sort(key=lambda each: (-each.num_transfers, -each.recent_bytes_per_s))
    return rows[:MAX_LINKS]


def _link(pair: tuple[str, str], num_transfers: int, goodput: float | None, recent: float) -> LinkRow:
    use = min(recent / goodput, 1.0) if goodput else None
    return LinkRow(
        prefill=pair[0],
        decode=pair[1],
        goodput_bytes_per_s=goodput,
        num_transfers=num_transfers,
        recent_bytes_per_s=recent,
        use=use,
    )


def _crossed(newest_first: Iterable[DecisionRecord], now: float) -> dict[tuple[str, str], float]:
    """Return KV bytes a second by pair, of the requests that ended lately."""
    rates: dict[tuple[str, str], float] = {}
    for record in newest_first:
        if ended_at(record) < now - WINDOW_S:
            break
        report, prefill = record.happened.decode_report, record.decision.prefill
        if prefill is not None and report is not None and report.transfer is not None:
            pair = (prefill, record.decision.decode)
            rates[pair] = rates.get(pair, 0.0) + report.transfer.payload_bytes / WINDOW_S
    return rates


def _said(status: Mapping[str, Any]) -> _Status:
    try:
        return msgspec.convert(status, type=_Status)
    except msgspec.ValidationError:
        return _Status()  # another server's words


def _transfers(side: _Side) -> Transfers:
    return Transfers(
        active=side.active,
        done=side.done,
        cancelled=side.cancelled,
        failed=sum(side.failures_by_reason.values()),
        payload_bytes=sum(side.payload_bytes_by_medium.values()),
        goodput_bytes_per_s=side.goodput_bytes_per_s,
        failures_by_reason=side.failures_by_reason,
    )
