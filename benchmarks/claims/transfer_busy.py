"""Does the transfer keep its goodput while the cores compute? As `transfer-goodput`, with a matrix loop on each core.

Both cores run a process that multiplies matrices without pause, at the same priority as the two ends of the transfer,
so each end has about half a core. The raw socket runs under the same load; NIXL is beside it. An end that needs more
CPU per byte than the raw socket, or that spins instead of waiting, loses here. The bound: 0.9 of the raw socket.
"""

from __future__ import annotations

from benchmarks.support import load
from benchmarks.support.goodput import COLUMNS, OURS, RATES, VARIANTS, figures, measure, missing, variants
from benchmarks.support.kv_pair import cores
from benchmarks.support.kv_shape import KVShape
from benchmarks.support.nixl_pair import nixl_pair, version
from benchmarks.support.result import ClaimResult, Table, unavailable
from tollbridge.bench.netns import LinkUnavailableError, link

DESCRIPTION = "With both cores computing, the KV transfer keeps 0.9 of a raw socket's goodput"

MIN_OF_RAW = 0.9
NAMES = {"1 Gb/s": "of_raw_1_gbit", "4.6 Gb/s": "of_raw_4600_mbit", "unshaped": "of_raw_unshaped"}


def run(quick: bool) -> ClaimResult:
    """Measure at 1 Gb/s, 4.6 Gb/s and unshaped, under load."""
    repetitions, shape = (2 if quick else 9), KVShape()
    try:
        with (
            link() as joined,
            variants(joined, shape) as pairs,
            nixl_pair(joined, pairs[OURS]) as nixl,
            load.busy(cores()),
        ):
            absent = missing(nixl, multi=False)
            results = measure(joined, pairs, nixl, repetitions, multi=False, rates=list(RATES), before=lambda: None)
    except LinkUnavailableError as error:
        return unavailable(str(error))
    ratios = {NAMES[result.rate]: result.ratio(OURS, ["raw"]) for result in results}
    others = {
        f"{name}, {NAMES[result.rate]}": result.ratio(name, ["raw"])
        for name in VARIANTS
        if name != OURS
        for result in results
    }
    nixl_ratios = {f"nixl_write_{NAMES[result.rate]}": result.ratio("NIXL WRITE", ["raw"]) for result in results}
    return ClaimResult(
        holds=all(ratio is not None and ratio >= MIN_OF_RAW for ratio in ratios.values()),
        figures={**ratios, **others, **nixl_ratios, "arms": figures(results)},
        bounds=dict.fromkeys(ratios, f">= {MIN_OF_RAW}"),
        conditions={
            "payload": str(shape),
            "repetitions": repetitions,
            "load": load.DESCRIPTION,
            "cores": f"prefill on core {cores()[0]}, decode on core {cores()[1]}",
            "nixl": version() or "absent",
            "missing": absent,
        },
        table=Table(
            title=f"{shape}, cores busy: goodput, median (min-max) of {repetitions}",
            columns=COLUMNS,
            rows=[row for result in results for row in result.rows()],
        ),
    )
