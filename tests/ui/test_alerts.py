"""What is wrong, in words."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.ui.records import NOW, local, split
from tollbridge.config.cluster import SloConfig
from tollbridge.ui.alerts import alerts
from tollbridge.ui.requests import row
from tollbridge.ui.snapshot import Alert, LinkRow, Window, WorkerRow

P = WorkerRow(name="p0", prefer="prefill", engine="embedded", host="a", ready=True, can_send=True)
D = WorkerRow(name="d0", prefer="decode", engine="embedded", host="b", ready=True, can_send=True)
DOWN = {"ready": False, "detail": "It did not answer."}


def change(worker: WorkerRow, **fields: Any) -> WorkerRow:
    return msgspec.structs.replace(worker, **fields)


def told(workers: list[WorkerRow], **more: Any) -> list[Alert]:
    quiet = {
        "links": [LinkRow(prefill="p0", decode="d0", goodput_bytes_per_s=1e8)], "recent": [], "waiting": 0,
        "discovery_error": None,
        "window": Window(seconds=10.0), "policy": "adaptive", "slo_ttft_s": 2.0, "slo_tpot_s": 0.1, "now": NOW,
    }  # fmt: skip
    return alerts(workers=workers, **{**quiet, **more})


def codes(workers: list[WorkerRow], **more: Any) -> list[str]:
    return [alert.code for alert in told(workers, **more)]


def test_all_is_well() -> None:
    assert told([P, D]) == []


def test_no_prefill_worker() -> None:
    first, second = told([change(P, **DOWN), D])
    assert first.text == "No ready prefill worker: everything runs local."
    assert (second.code, second.subject, second.text) == ("not_ready", "p0", "p0 is not ready. It did not answer.")
    assert "no_ready_prefill" in codes([change(P, suspect=True), D])
    assert "no_ready_prefill" in codes([change(P, can_send=False), D])


@pytest.mark.parametrize(
    ("workers", "code"),
    [
        ([change(P, **DOWN), change(D, **DOWN)], "no_worker"),
        ([P, change(D, **DOWN)], "no_ready_decode"),
        ([P, change(D, suspect=True)], "suspect"),
        ([change(P, pinned_full=True), D], "pinned_bound"),
        ([P, change(D, kv_total_tokens=100, kv_used_tokens=96)], "kv_full"),
        ([change(P, prefer="any")], "one_worker"),
    ],
)
def test_workers(workers: list[WorkerRow], code: str) -> None:
    assert code in codes(workers)


def test_requests() -> None:
    slo = SloConfig()
    broken = row(split(1, split_verified=False, error="Its checksum was wrong."), slo)
    (alert,) = told([P, D], recent=[broken, row(split(2), slo)])
    expected = "1 of the last 2 splits paid for prefill twice: their KV did not arrive. Its checksum was wrong."
    assert alert.text == expected
    assert codes([P, D], recent=[row(local(1, status="error"), slo)]) == ["errors"]
    assert codes([P, D], recent=[row(local(90, status="error"), slo)]) == []  # that is over


def test_speed_and_queue() -> None:
    late = Window(seconds=10.0, num_ended=9, ttft_p95_s=3.0, tpot_p95_s=0.3)
    assert codes([P, D], window=late, waiting=2) == ["ttft", "tpot", "waiting"]
    assert codes([P, D], discovery_error="The file is gone.") == ["discovery"]
    assert codes([P, D], window=msgspec.structs.replace(late, num_ended=2)) == []


def test_notes_come_last() -> None:
    assert codes([change(P, **DOWN), D], policy="local")[-1] == "policy_local"
    assert codes([P, D], links=[LinkRow(prefill="p0", decode="d0")]) == ["unknown_link"]
