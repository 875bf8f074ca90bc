"""Ten thousand transfers under random faults: none wrong, none without an end, no block lost.

Simulated: the real TCP medium on a network in memory, one thread, a manual clock; every fault strikes at least 200
times in each state of the protocol that it can occur in, and then fewer times with two connections per pair of workers.
Sockets: the same medium on the loopback interface through a proxy that spoils frames. Planted: bugs put in
on purpose, each of which the storm must find.
"""

from __future__ import annotations

import logging
import re

from tests.transfer.storm import sockets
from tests.transfer.storm.planted import PLANTED
from tests.transfer.storm.scenes import COLUMNS
from tests.transfer.storm.simulation import Simulation, StormResult

from benchmarks.support.result import ClaimResult, Table

DESCRIPTION = "10,000 transfers with random faults: none accepted wrong, none without an end, no block leaked"
SEED = 20_261_129
WANTED = 200  # of each fault in each state
NUM_SIMULATED, NUM_SOCKETS = 10_000, 3_000


def run(quick: bool) -> ClaimResult:
    """Run both storms and the planted bugs. A broken promise is an AssertionError, and the claim does not hold."""
    logging.getLogger("tollbridge").setLevel(logging.CRITICAL)  # refusals are what this is about
    wanted, num_simulated, num_sockets = (5, 500, 160) if quick else (WANTED, NUM_SIMULATED, NUM_SOCKETS)
    simulated = Simulation(SEED, wanted=wanted).run(num_simulated)
    striped = Simulation(SEED, wanted=wanted // 10, num_streams=2).run(num_simulated // 5)
    real = sockets.run(num_sockets, seed=SEED)
    found = [name for name in PLANTED if _finds(name)]
    figures = {
        "num_transfers": simulated.num_transfers + striped.num_transfers + real.num_transfers,
        "num_simulated": simulated.num_transfers,
        "num_simulated_over_two_streams": striped.num_transfers,
        "num_over_sockets": real.num_transfers,
        "least_count_of_a_fault_in_a_state": simulated.counts.least,
        "num_wrong": 0,  # the first of any of these would have ended the run
        "num_without_end": 0,
        "num_blocks_leaked": 0,
        "num_untouched_all_done": simulated.num_untouched + striped.num_untouched,
        "planted_found": len(found),
        "decode_outcomes": dict(simulated.decode_outcomes + striped.decode_outcomes + real.outcomes),
        "simulated_s": simulated.seconds + striped.seconds,
        "sockets_s": real.seconds,
    }
    return ClaimResult(
        holds=simulated.counts.least >= wanted and len(found) == len(PLANTED),
        figures=figures,
        bounds={
            "num_wrong": "== 0",
            "num_without_end": "== 0",
            "num_blocks_leaked": "== 0",
            "least_count_of_a_fault_in_a_state": f">= {wanted}",
            "planted_found": f"== {len(PLANTED)}",
        },
        conditions={"seed": SEED, "link": "in memory; loopback TCP through a proxy"},
        table=_table(simulated),
    )


def _finds(name: str) -> bool:
    """Return whether a storm finds this planted bug, with the complaint that fits it."""
    plant, complaint = PLANTED[name]
    try:
        with plant():
            Simulation(SEED, wanted=2).run(1000)
    except AssertionError as error:
        return re.search(complaint, str(error)) is not None
    return False


def _table(result: StormResult) -> Table:
    title = f"Transfers hit, by fault and by the state that it found ({result.num_transfers} transfers, simulated)"
    return Table(title=title, columns=["fault", *COLUMNS], rows=result.counts.rows())
