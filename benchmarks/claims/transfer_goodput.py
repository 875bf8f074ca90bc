"""Does the transfer fill the link? 273 MB of scattered blocks, beside plain sockets, iperf3 and NIXL.

Two processes, one core each, in two network namespaces joined by a veth pair that `tc tbf` shapes. Everything is host
memory; checksums are on. All arms run once per repetition, in rotated order, and ratios are taken within a repetition.

    raw                     one TCP stream of a Python socket, sendall and recv_into of 1 MiB, cache to cache
    raw xN, iperf3 -P N     several streams: threads of the same, and Debian's iperf3 (unshaped only)
    tollbridge              TcpSender to TcpReceiver, blocks at random places of both caches
    tollbridge, 1 stream    the same over one connection
    tollbridge, threads     the same with I/O threads in the engine's process instead of a process beside it
    tollbridge, neighbours  blocks side by side
    NIXL WRITE, READ        nixl over UCX TCP, the same 64 KiB blocks as prepared descriptors

With its default options the transfer must reach 0.98 of raw on a shaped link; unshaped, 0.9 of the best multi-stream
copy, and NIXL's WRITE.
"""

from __future__ import annotations

from benchmarks.support.goodput import (
    COLUMNS,
    OURS,
    RATES,
    RateResult,
    figures,
    measure,
    missing,
    multi_stream_arms,
    variants,
)
from benchmarks.support.kv_pair import cores
from benchmarks.support.kv_shape import KVShape
from benchmarks.support.nixl_pair import nixl_pair, version
from benchmarks.support.quiet import Quiet
from benchmarks.support.result import ClaimResult, Table, unavailable
from tollbridge.bench.netns import LinkUnavailableError, link

DESCRIPTION = "The KV transfer fills a shaped link like a raw socket, and an unshaped one like several"

MIN_SHAPED = 0.98
MIN_MULTI = 0.9
MIN_NIXL = 1.0


def run(quick: bool) -> ClaimResult:
    """Measure at 1 Gb/s, 4.6 Gb/s and unshaped."""
    repetitions, shape, quiet = (2 if quick else 9), KVShape(), Quiet()
    try:
        with (
            link() as joined,
            variants(joined, shape) as pairs,
            nixl_pair(joined, pairs[OURS]) as nixl,
        ):
            absent = missing(nixl, multi=True)
            results = measure(joined, pairs, nixl, repetitions, multi=True, rates=list(RATES), before=quiet.wait)
    except LinkUnavailableError as error:
        return unavailable(str(error))
    ratios = _ratios({result.rate: result for result in results})
    bounds = {name: bound for name, (_, bound) in ratios.items()}
    return ClaimResult(
        holds=all(value is not None and value >= bound for value, bound in ratios.values()),
        figures={**{name: value for name, (value, _) in ratios.items()}, "arms": figures(results)},
        bounds={name: f">= {bound}" for name, bound in bounds.items()},
        conditions={
            "payload": str(shape),
            "repetitions": repetitions,
            "cores": f"prefill on core {cores()[0]}, decode on core {cores()[1]}, rivals too",
            "links": ", ".join(
                f"{name} (tc tbf, burst 1 MB, latency 20 ms)" if tc else name for name, tc in RATES.items()
            ),
            "nixl": version() or "absent",
            "missing": absent,
            "others": str(quiet),
        },
        table=Table(
            title=f"{shape}: goodput, median (min-max) of {repetitions}",
            columns=COLUMNS,
            rows=[row for result in results for row in result.rows()],
        ),
    )


def _ratios(results: dict[str, RateResult]) -> dict[str, tuple[float | None, float]]:
    """Return each figure that is bounded, with its bound; None: the rival was not there."""
    unshaped = results["unshaped"]
    return {
        "of_raw_1_gbit": (results["1 Gb/s"].ratio(OURS, ["raw"]), MIN_SHAPED),
        "of_raw_4600_mbit": (results["4.6 Gb/s"].ratio(OURS, ["raw"]), MIN_SHAPED),
        "of_best_multi_stream_unshaped": (unshaped.ratio(OURS, multi_stream_arms()), MIN_MULTI),
        "of_nixl_write_unshaped": (unshaped.ratio(OURS, ["NIXL WRITE"]), MIN_NIXL),
    }
