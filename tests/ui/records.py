"""Decision records as the router makes them."""

from __future__ import annotations

from typing import Any

from tollbridge.wire.decision import Decision, DecisionRecord, Happened
from tollbridge.wire.params import TransferReport, WorkerReport

NOW = 1000.0


def local(number: int = 0, **happened: Any) -> DecisionRecord:
    """Return a local request on d0 that ended at NOW - number."""
    decision = Decision(
        id=f"l{number}", policy="adaptive", choice="local", decode="d0", reason="local_pays", why="Local is cheaper.",
        terms={"prompt_tokens": 100.0, "cached_tokens": 36.0, "ttft_s": 0.2},
    )  # fmt: skip
    report = WorkerReport(role="local", prefill_s=0.1, prompt_tokens=100)
    return _record(decision, number, {"ttft_s": 0.25, "total_s": 1.25, "decode_report": report, **happened})


def split(number: int = 0, *, terms: dict[str, float] | None = None, **happened: Any) -> DecisionRecord:
    """Return a split p0 -> d0 that ended at NOW - number: 0.1 s wait, 0.3 s prefill, a toll of 0.1 s."""
    known = {"prompt_tokens": 800.0, "decode_cached_tokens": 99.0, "fleet_streams": 4.0, "stall_s": 0.5}
    decision = Decision(
        id=f"s{number}", policy="adaptive", choice="split", decode="d0", prefill="p0", reason="split_pays",
        why="The split is cheaper.", terms={**known, "streams": 1.0, "slowed_s": 0.5, **(terms or {})},
    )  # fmt: skip
    transfer = TransferReport(transfer_id="0" * 32, side="receive", outcome="done", num_tokens=700, payload_bytes=5000)
    reports = {
        "prefill_report": WorkerReport(role="prefill", queue_s=0.1, prefill_s=0.3, prompt_tokens=800),
        "decode_report": WorkerReport(role="decode", prompt_tokens=800, transfer=transfer),
    }
    return _record(decision, number, {"ttft_s": 0.5, "total_s": 1.5, "split_verified": True, **reports, **happened})


def _record(decision: Decision, number: int, happened: dict[str, Any]) -> DecisionRecord:
    total_s = happened.get("total_s") or 0.0
    return DecisionRecord(
        at=NOW - number - total_s,
        decision=decision,
        happened=Happened(**{"status": "ok", "completion_tokens": 11, **happened}),
    )
