"""Records -> rows and windows."""

from __future__ import annotations

import pytest

from tests.ui.records import NOW, local, split
from tollbridge.config.cluster import SloConfig
from tollbridge.ui.requests import ended, percentile, phase, row, window

SLO = SloConfig()
RUNNING = {"status": "running", "total_s": None, "ttft_s": None, "decode_report": None}


def test_a_split_in_short() -> None:
    it = row(split(), SLO)
    assert (it.choice, it.prefill, it.decode, it.status, it.phase) == ("split", "p0", "d0", "ok", "ended")
    assert (it.lacked_tokens, it.kv_bytes, it.verified, it.in_slo) == (700, 5000, True, True)
    assert (it.ttft_s, it.toll_s, it.avoided_s, it.prefill_s) == (0.5, 0.1, 1.5, 0.3)


def test_a_local_request_in_short() -> None:
    it = row(local(queue_s=0.5), SLO)
    assert (it.choice, it.prefill, it.toll_s, it.avoided_s) == ("local", None, None, None)
    assert (it.ttft_s, it.predicted_ttft_s, it.tpot_s, it.lacked_tokens) == (0.75, 0.2, 0.1, 63)


def test_phases() -> None:
    assert phase(split(**RUNNING, prefill_report=None)) == "prefill"
    assert phase(split(**RUNNING)) == "transfer"
    assert phase(split(**{**RUNNING, "ttft_s": 0.5})) == "decode"
    assert phase(local(**RUNNING)) == "prefill"
    assert phase(local()) == "ended"
    assert row(local(**RUNNING), SLO).in_slo is None


def test_the_latest_end_comes_first() -> None:
    records = [local(5), split(1), local(3, **RUNNING), local(2)]
    assert [each.decision.id for each in ended(records)] == ["s1", "l2", "l5"]


def test_a_window_counts_what_ended_in_it() -> None:
    records = ended([local(1), local(2, ttft_s=5.0, total_s=6.0), split(3), local(11)])
    now = window(records, SLO, NOW, is_whole=True)
    assert (now.seconds, now.num_ended, now.slo_share) == (10.0, 3, 0.6667)
    assert (now.ttft_p50_s, now.ttft_p95_s, now.gap_p95_s) == (0.5, 5.0, None)
    assert window(ended([local(1, longest_gap_s=0.3)]), SLO, NOW, is_whole=True).gap_p95_s == 0.3


def test_a_window_is_no_longer_than_memory() -> None:
    """With a thousand records of two seconds, nobody knows of the eight before."""
    now = window(ended([local(1), local(2)]), SLO, NOW, is_whole=False)
    assert now.seconds == pytest.approx(2.0)
    assert window([], SLO, NOW, is_whole=False).num_ended == 0


def test_a_full_window_is_sampled() -> None:
    records = [local(1 + number / 1000, ttft_s=0.001 * number, total_s=2.0) for number in range(1000)]
    now = window(ended(records), SLO, NOW, is_whole=True)
    assert now.num_ended == 1000
    assert now.ttft_p50_s == pytest.approx(0.5, abs=0.01)


def test_percentiles() -> None:
    assert percentile([], 0.5) is None
    assert percentile([1.0], 0.95) == 1.0
    assert percentile([float(each) for each in range(100)], 0.95) == 95.0
