"""What a person should know now, in words, the worst first. Pure: from the rows of a snapshot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tollbridge.ui.snapshot import Alert, Level, LinkRow, RequestRow, Window, WorkerRow

KV_FULL = 0.95
BIAS = 0.5
MIN_ENDED = 5  # requests, before a percentile is worth an alert
_ORDER: dict[Level, int] = {"bad": 0, "warn": 1, "note": 2}


def alerts(
    *,
    workers: Sequence[WorkerRow],
    links: Sequence[LinkRow],
    recent: Sequence[RequestRow],
    window: Window,
    waiting: int,
    discovery_error: str | None,
    policy: str,
    slo_ttft_s: float,
    slo_tpot_s: float,
    now: float,
) -> list[Alert]:
    """Return the alerts; nothing when all is well."""
    lately = [each for each in recent if now - each.at - (each.total_s or 0.0) < 60.0]
    found = [
        *_roles(workers),
        *_workers(workers),
        *_splits(lately),
        *_errors(lately),
        *_speed(window, slo_ttft_s, slo_tpot_s),
        *_router(waiting, discovery_error),
        *_notes(policy, links, workers),
    ]
    return sorted(found, key=lambda each: _ORDER[each.level])


def _roles(workers: Sequence[WorkerRow]) -> Iterator[Alert]:
    ready = [worker for worker in workers if worker.ready]
    if not ready:
        yield Alert(level="bad", code="no_worker", text="No worker is ready: every request is refused.")
        return
    senders = [worker for worker in ready if worker.prefer != "decode" and worker.can_send and not worker.suspect]
    if len(workers) > 1 and not senders:
        yield Alert(level="bad", code="no_ready_prefill", text="No ready prefill worker: everything runs local.")
    if all(worker.prefer == "prefill" for worker in ready):
        yield Alert(
            level="bad", code="no_ready_decode", text="No ready decode worker: prefill workers serve everything alone."
        )


def _workers(workers: Sequence[WorkerRow]) -> Iterator[Alert]:
    for worker in workers:
        if not worker.ready:
            text = f"{worker.name} is not ready. {worker.detail}"
            yield Alert(level="bad", code="not_ready", text=text, subject=worker.name)
        elif worker.suspect:
            text = f"{worker.name} has just failed a request: it is the last choice for a moment."
            yield Alert(level="warn", code="suspect", text=text, subject=worker.name)
        if worker.pinned_full:
            text = f"{worker.name} holds as much KV that nobody has fetched as it may: no new splits with it."
            yield Alert(level="warn", code="pinned_bound", text=text, subject=worker.name)
        if worker.ready and worker.kv_total_tokens and worker.kv_used_tokens > KV_FULL * worker.kv_total_tokens:
            text = f"The KV cache of {worker.name} is full: requests wait there for room."
            yield Alert(level="warn", code="kv_full", text=text, subject=worker.name)


def _splits(lately: Sequence[RequestRow]) -> Iterator[Alert]:
    judged = [each for each in lately if each.verified is not None]
    broken = [each for each in judged if each.verified is False]
    if broken:
        text = f"{len(broken)} of the last {len(judged)} splits paid for prefill twice: their KV did not arrive."
        yield Alert(level="warn", code="split_unverified", text=f"{text} {broken[0].error}".strip())


def _errors(lately: Sequence[RequestRow]) -> Iterator[Alert]:
    failed = [each for each in lately if each.status == "error"]
    if failed:
        text = f"{len(failed)} of the last {len(lately)} requests ended in an error. {failed[0].error}"
        yield Alert(level="warn", code="errors", text=text.strip())


def _speed(window: Window, slo_ttft_s: float, slo_tpot_s: float) -> Iterator[Alert]:
    if window.num_ended < MIN_ENDED:
        return
    if window.ttft_p95_s is not None and window.ttft_p95_s > slo_ttft_s:
        text = f"First tokens are late: p95 {window.ttft_p95_s:.2g} s, the SLO is {slo_ttft_s:g} s."
        yield Alert(level="warn", code="ttft", text=text)
    if window.tpot_p95_s is not None and window.tpot_p95_s > slo_tpot_s:
        text = f"Tokens come slowly: p95 {window.tpot_p95_s * 1e3:.0f} ms each, the SLO is {slo_tpot_s * 1e3:g} ms."
        yield Alert(level="warn", code="tpot", text=text)


def _router(waiting: int, discovery_error: str | None) -> Iterator[Alert]:
    if discovery_error is not None:
        text = f"Who serves cannot be seen, and what was known last stands. {discovery_error}"
        yield Alert(level="warn", code="discovery", text=text)
    if waiting:
        text = f"{waiting} request{'s' if waiting > 1 else ''} wait for a place: the router is full."
        yield Alert(level="warn", code="waiting", text=text)


def _notes(policy: str, links: Sequence[LinkRow], workers: Sequence[WorkerRow]) -> Iterator[Alert]:
    if policy == "local":
        text = "The policy is local: nothing is split unless a request asks for it."
        yield Alert(level="note", code="policy_local", text=text)
    elif links and all(link.goodput_bytes_per_s is None for link in links):
        text = "No link has been measured yet: the first splits are there to learn it."
        yield Alert(level="note", code="unknown_link", text=text)
    if len(workers) == 1:
        text = "There is one worker only: a split needs two."
        yield Alert(level="note", code="one_worker", text=text)
