"""What a split costs and spares, and whether a request met its SLO."""

from __future__ import annotations

import pytest

from tests.ui.records import local, split
from tollbridge.config.cluster import SloConfig
from tollbridge.router.payoff import maybe_payoff, maybe_tpot_s, meets
from tollbridge.wire.decision import DecisionRecord

SLO = SloConfig(ttft_s=1.0, tpot_s=0.2)


def payoff(record: DecisionRecord) -> tuple[float, float] | None:
    return maybe_payoff(record.decision, record.happened)


def test_a_split_pays_its_toll_and_spares_the_streams() -> None:
    toll_s, avoided_s = payoff(split()) or (0.0, 0.0)
    assert toll_s == pytest.approx(0.5 - 0.1 - 0.3)
    assert avoided_s == pytest.approx(4 * 0.5 - 1 * 0.5)  # less what the prefill worker's own stream stood still


def test_a_split_whose_kv_did_not_come_has_spared_nobody() -> None:
    assert payoff(split(split_verified=False))[1] == 0.0


def test_without_reports_the_prediction_stands() -> None:
    assert payoff(split(prefill_report=None, terms={"toll_s": 0.7}))[0] == 0.7
    assert payoff(split(prefill_report=None)) is None


@pytest.mark.parametrize("record", [local(), split(status="error"), split(status="running")])
def test_nothing_else_counts(record: DecisionRecord) -> None:
    assert payoff(record) is None


def test_gap_between_tokens() -> None:
    assert maybe_tpot_s(local().happened) == pytest.approx(0.1)
    assert maybe_tpot_s(local(completion_tokens=1).happened) is None
    assert maybe_tpot_s(local(ttft_s=None).happened) is None
    assert maybe_tpot_s(local(completion_tokens=22, num_choices=2).happened) == pytest.approx(0.1)
    assert maybe_tpot_s(local(completion_tokens=1, num_choices=10**17).happened) is None


@pytest.mark.parametrize(
    ("happened", "good"),
    [
        ({}, True),
        ({"status": "error"}, False),
        ({"ttft_s": 1.1, "total_s": 1.2}, False),
        ({"queue_s": 0.8}, False),  # waited too long for its place
        ({"total_s": 0.25 + 10 * 0.21}, False),
        ({"ttft_s": None, "total_s": 2.9}, True),  # whole: 1 s and 10 gaps of 0.2 s
        ({"ttft_s": None, "total_s": 3.1}, False),
        ({"completion_tokens": 33, "num_choices": 3, "total_s": 0.25 + 10 * 0.21}, False),
        ({"completion_tokens": 33, "num_choices": 3, "ttft_s": None, "total_s": 3.1}, False),
    ],
)
def test_goodput(happened: dict[str, float], good: bool) -> None:
    assert meets(local(**happened).happened, SLO) is good
