"""What a worker tells of a request's past to whoever collects traces: one span for its leg, and below it the steps.

worker      arrival -> end, role and tokens
  queue     until it was first scheduled; on decode that includes the wait for KV
  transfer  decode only: from asking for KV to its end; how it went, how much, by what
  compute   the prompt, or what of it was lacking, to the first token
  tokens    first token -> last
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from tollbridge.engine.base import StepOutput
from tollbridge.obs.tracing import Past
from tollbridge.wire.params import TransferReport, WorkerReport
from tollbridge.worker.door import Door
from tollbridge.worker.job import Job


class Branch(Protocol):
    """As much of a branch's progress as is told. Times are monotonic seconds."""

    num_tokens: int
    first_token_s: float | None
    last_token_s: float
    ending: StepOutput | None


def tell(door: Door, job: Job, branches: Sequence[Branch], outcome: str, error: str) -> None:
    """Hand the request's spans to the worker's tracer. Of several choices the first one stands for all."""
    shift = door.clock.wall() - door.clock.monotonic()
    lead = branches[0] if branches else None
    report = lead.ending.report if lead is not None and lead.ending is not None else None
    whole = Past(
        name="worker",
        start=job.arrival_s + shift,
        end=door.clock.wall(),
        attributes={
            "worker": door.identity.name,
            "role": job.role,
            "request": job.request_id,
            "finish": outcome,
            "prompt_tokens": job.num_prompt_tokens,
            "generated_tokens": sum(each.num_tokens for each in branches),
            "cached_tokens": report.cached_tokens if report else None,
            "loaded_tokens": report.loaded_tokens if report else None,
        },
        error=(error or outcome) if outcome in ("error", "abort") else "",
    )
    door.tracer.tell(job.trace, whole, list(_steps(whole.start, shift, lead, report)))


def _steps(start: float, shift: float, lead: Branch | None, report: WorkerReport | None) -> Iterator[Past]:
    if report is not None:
        scheduled = start + report.queue_s
        yield Past("queue", start, scheduled)
        if report.transfer is not None and report.transfer.side == "receive":
            yield _transfer(report.transfer, start, scheduled)
        if report.prefill_s:
            yield Past("compute", scheduled, scheduled + report.prefill_s, {"tokens": report.computed_tokens})
    if lead is not None and lead.first_token_s is not None:
        first, last = lead.first_token_s + shift, lead.last_token_s + shift
        yield Past("tokens", first, last, {"tokens": lead.num_tokens})


def _transfer(transfer: TransferReport, start: float, scheduled: float) -> Past:
    """A load ends when its request may be scheduled; from there it is told backwards."""
    failed = transfer.outcome != "done"
    return Past(
        name="transfer",
        start=max(start, scheduled - transfer.total_s),
        end=scheduled,
        attributes={
            "transfer": transfer.transfer_id[:8],  # the whole of it would let a reader fetch KV
            "outcome": transfer.outcome,
            "reason": transfer.reason or None,
            "medium": transfer.medium or None,
            "payload_bytes": transfer.payload_bytes,
            "wait_s": transfer.wait_s,
            "wire_s": transfer.wire_s,
        },
        error=(transfer.detail or transfer.reason) if failed else "",
    )
