from __future__ import annotations

import pytest

from tollbridge.bench.watch import energy_j


def test_energy_is_the_integral_of_power_over_the_whole_window() -> None:
    assert energy_j([(1.0, 100.0), (3.0, 300.0)], 0.5, 4.0) == pytest.approx(50 + 400 + 300)


@pytest.mark.parametrize("readings", [[], [(0.1, 400.0)]])
def test_energy_of_a_window_too_short_to_tell_is_unknown_not_zero(readings: list[tuple[float, float]]) -> None:
    assert energy_j(readings, 0.0, 0.2) is None
