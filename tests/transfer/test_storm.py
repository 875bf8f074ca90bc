"""Some hundreds of transfers under faults; the claim `transfer-storm` runs ten thousand, and prints the counts."""

from __future__ import annotations

import pytest

from tests.transfer.storm import sockets
from tests.transfer.storm.planted import PLANTED
from tests.transfer.storm.scenes import CELLS, FAULTS, SCENES, Counts
from tests.transfer.storm.simulation import Simulation


@pytest.mark.parametrize(("seed", "num_streams"), [(1, 1), (2, 2)])
def test_storm(seed: int, num_streams: int) -> None:
    """Nothing wrong is accepted, nothing is left without an end, no block leaks: the simulation asserts all of it."""
    result = Simulation(seed, wanted=1, num_streams=num_streams).run(150)
    assert result.counts.least >= 1
    assert result.num_untouched > 20
    assert result.decode_outcomes["done"] > result.num_untouched / 2


def test_a_seed_reproduces_a_run() -> None:
    first, second = (Simulation(7, wanted=0).run(40) for _ in range(2))
    assert first.counts.rows() == second.counts.rows()
    assert (first.prefill_outcomes, first.decode_outcomes) == (second.prefill_outcomes, second.decode_outcomes)


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_found(name: str) -> None:
    plant, complaint = PLANTED[name]
    with plant(), pytest.raises(AssertionError, match=complaint):
        for seed in range(1, 9):  # some bugs need a rare moment, which not every seed brings about
            Simulation(seed, wanted=2).run(400)


def test_every_fault_has_its_scenes() -> None:
    assert {scene.fault for scene in SCENES} == set(FAULTS)
    counts = Counts(1)
    for scene in SCENES:
        counts.hit(*scene)
    assert counts.least >= 1 and not counts.lacking()
    assert len(CELLS) == 99


def test_storm_over_sockets() -> None:
    result = sockets.run(80, seed=1)
    assert result.num_transfers == 80
    assert {fault for fault, _ in result.counts} == set(sockets.FAULTS)
    assert result.outcomes["done"] > 20
