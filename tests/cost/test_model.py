from __future__ import annotations

import pytest

from tollbridge.config.calibration import Calibration, EngineCalibration, LinkCalibration, PrefillFit
from tollbridge.cost.habits import Average, OutputLengths, Rate
from tollbridge.cost.model import DEFAULT_KV_BYTES, CostModel

SEED = Calibration(
    engines={"p0": EngineCalibration(prefill=PrefillFit(alpha_s=0.01, beta_s_per_token=1e-3))},
    links={"a>b": LinkCalibration(goodput_bytes_per_s=1e7)},
)


def test_seeds() -> None:
    model = CostModel.seeded(SEED, [("b", "a", 5e6)])
    assert model.engine("p0").known
    assert model.link("a", "b").goodput_bytes_per_s == 1e7
    assert model.link("b", "a").goodput_bytes_per_s == 5e6
    assert not model.link("a", "c").known


def test_a_strange_engine_is_like_the_others_until_it_is_known() -> None:
    model = CostModel.seeded(SEED)
    assert model.engine("d0").prefill_s(1000, 0, 2048) == pytest.approx(1.01)
    model.own_engine("d0").observe_prefill(5.0, 1000, 0, 2048)
    assert model.engine("d0").prefill_s(1000, 0, 2048) == pytest.approx(5.0, rel=0.05)
    assert model.engine("p0").prefill_s(1000, 0, 2048) == pytest.approx(1.01)


def test_nothing_is_known_at_first() -> None:
    assert not CostModel().engine("d0").known


def test_statistics_are_a_calibration() -> None:
    shown = CostModel.seeded(SEED).statistics(0.0)
    again = CostModel.seeded(Calibration(engines=dict(shown.engines), links=dict(shown.links)))
    assert again.engine("p0").prefill_s(500, 0, 512) == pytest.approx(
        CostModel.seeded(SEED).engine("p0").prefill_s(500, 0, 512)
    )
    assert again.link("a", "b").goodput_bytes_per_s == 1e7


def test_rate() -> None:
    rate = Rate(30.0)
    assert rate.per_s(5.0) == 0.0
    for at in range(200):
        rate.count(at * 0.5)
    assert rate.per_s(100.0) == pytest.approx(2.0, rel=0.1)
    assert rate.per_s(400.0) < 0.01


def test_a_single_event_is_no_flood() -> None:
    rate = Rate(30.0)
    rate.count(1.0)
    assert rate.per_s(1.0) < 0.5


def test_average_resists_an_outlier() -> None:
    average = Average()
    for value in [1.0, 1.1, 0.9, 1.0, 1.05, 100.0]:
        average.add(value)
    assert average.value(0.0) < 2.0
    assert Average().value(7.0) == 7.0


def test_requests_with_bounds_alike_have_answers_alike() -> None:
    lengths = OutputLengths()
    assert lengths.expected(64, 128.0) == 64  # nothing is known: the bound
    assert lengths.expected(None, 128.0) == 128.0
    for _ in range(50):
        lengths.add(3.0, 4)
    assert lengths.expected(1000, 128.0) == 128.0  # three quarters of their bounds are used, or what is usual
    assert lengths.expected(100, 128.0) == pytest.approx(75.0)
    assert lengths.expected(None, 128.0) == pytest.approx(96.0)  # as if that were 128
    lengths.add(300.0, 1000)
    assert lengths.expected(900, 128.0) == pytest.approx(300.0)
    assert lengths.expected(4, 128.0) == pytest.approx(3.0)
    lengths.add(80.0)
    assert lengths.expected(None, 128.0) == pytest.approx(80.0)
    assert lengths.expected(200, 128.0) <= 200
    assert lengths.num_values == 52


def test_kv_weighs_what_its_sender_says_times_what_the_wire_made_of_it() -> None:
    """Two models behind one router, both sent as fp8: the one's reports are no price of the other's tokens."""
    cost = CostModel()
    assert (cost.kv_bytes(0.0), cost.kv_bytes(1000.0)) == (DEFAULT_KV_BYTES, 1000.0)
    for _ in range(50):
        cost.weighed(500.0, 1000.0)
        cost.weighed(2000.0, 4000.0)
    assert (cost.kv_bytes(1000.0), cost.kv_bytes(4000.0)) == (500.0, 2000.0)
    assert 500.0 < cost.kv_bytes(0.0) < 2000.0  # of whom nothing is known
