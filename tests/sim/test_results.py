"""Figures from records, against numpy and by hand."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollbridge.config.cluster import SloConfig
from tollbridge.sim.results import Record, Tally, quantiles


def record(ttft_s: float, gaps: list[float], **more: object) -> Record:
    times = array("d", np.cumsum([1.0 + ttft_s, *gaps]).tolist())
    return Record(at_s=1.0, num_prompt=10, ttft_s=ttft_s, token_times=times, **more)  # type: ignore[arg-type]


def test_goodput_asks_for_every_slo() -> None:
    tally = Tally(SloConfig(ttft_s=1.0, tpot_s=0.1, itl_p99_s=0.2))
    tally.add(record(0.5, [0.05] * 9))
    tally.add(record(1.5, [0.05] * 9))  # late
    tally.add(record(0.5, [0.15] * 9))  # slow
    tally.add(record(0.5, [0.01] * 8 + [0.5]))  # one long gap
    tally.add(Record(at_s=1.0, num_prompt=10, failed=True))
    tally.add(record(0.5, []))  # one token has no gaps
    made = tally.result("it", span_s=10.0, num_gpus=2, preemptions=0, now_s=20.0)
    assert (made.num_requests, made.num_failed) == (6, 1)
    assert made.good == pytest.approx(2 / 6)
    assert (made.goodput_per_s, made.goodput_per_gpu_s) == (pytest.approx(0.2), pytest.approx(0.1))


def test_what_came_in_the_warmup_does_not_count() -> None:
    tally = Tally(SloConfig(), warmup_s=2.0)
    tally.add(record(0.5, [0.05]))
    made = tally.result("it", span_s=1.0, num_gpus=1, preemptions=0, now_s=3.0)
    assert (tally.num_ended, made.num_requests) == (1, 0)


@given(st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=200))
def test_quantiles_are_numpys(values: list[float]) -> None:
    made = quantiles(values)
    expected = np.percentile(values, [50, 90, 99])
    assert [made.p50, made.p90, made.p99] == pytest.approx(expected.tolist())


@given(st.lists(st.floats(1e-4, 5.0), min_size=1, max_size=300))
def test_pooled_gaps_are_right_within_their_bins(gaps: list[float]) -> None:
    tally = Tally(SloConfig())
    tally.add(record(0.1, gaps))
    made = tally.result("it", span_s=1.0, num_gpus=1, preemptions=0, now_s=1.0).itl_s
    ordered = sorted(gaps)
    for share, value in ((0.5, made.p50), (0.9, made.p90), (0.99, made.p99)):
        exact = ordered[max(0, int(np.ceil(share * len(ordered))) - 1)]
        assert value == pytest.approx(exact, rel=0.006)
    assert made.mean == pytest.approx(float(np.mean(gaps)))
