"""What do the media cost between two workers of one host? TCP, a ring in shared memory, and NIXL over UCX TCP.

Two processes, one core each, host memory, blocks at random places of both caches, checksums on; NIXL with UCX_TLS=tcp,
so that it shows what the adapter costs and not what UCX finds on this host. All arms run once per repetition, in
rotated order. CPU seconds count user and system time of both processes, NIXL's own threads included.

Shared memory must be no slower than TCP and cost less CPU. As long as that is not shown, `auto` stays with TCP.
"""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
from collections.abc import Callable

from benchmarks.support.kv_pair import Copy, cores, local_pair
from benchmarks.support.kv_shape import KVShape
from benchmarks.support.repeat import alternate, ratios, spread
from benchmarks.support.result import ClaimResult, Table

DESCRIPTION = "Between two workers of one host, shared memory is faster than TCP and costs less CPU"

MAX_CPU = 0.95  # of TCP's
MIN_GOODPUT = 1.0
ARMS: dict[str, dict[str, object]] = {"tcp": {}, "shm": {"media": "shm"}, "nixl": {"media": "nixl"}}


def run(quick: bool) -> ClaimResult:
    """Measure 273 MB per arm and repetition."""
    repetitions, shape = (2 if quick else 9), KVShape()
    names = [name for name in ARMS if name != "nixl" or importlib.util.find_spec("nixl") is not None]
    with contextlib.ExitStack() as stack:
        arms: dict[str, Callable[[], Copy]] = {}
        for name in names:
            pair = stack.enter_context(local_pair(shape, ARMS[name], {"UCX_TLS": "tcp"}))
            arms.setdefault("raw", pair.raw)
            arms[name] = pair.kv
        copies = alternate(arms, repetitions)
    cpu = {name: [_cpu_s_per_gb(copy) for copy in found] for name, found in copies.items()}
    rate = {name: [copy.bytes_per_s for copy in found] for name, found in copies.items()}
    figures: dict[str, float] = {
        "shm_cpu_ratio_to_tcp": statistics.median(ratios(cpu["shm"], cpu["tcp"])),
        "shm_goodput_ratio_to_tcp": statistics.median(ratios(rate["shm"], rate["tcp"])),
    }
    for name in copies:
        figures[f"{name}_cpu_s_per_gb"] = statistics.median(cpu[name])
        figures[f"{name}_goodput_bytes_per_s"] = statistics.median(rate[name])
    return ClaimResult(
        holds=figures["shm_cpu_ratio_to_tcp"] <= MAX_CPU and figures["shm_goodput_ratio_to_tcp"] >= MIN_GOODPUT,
        figures=dict(figures),
        bounds={"shm_cpu_ratio_to_tcp": f"<= {MAX_CPU}", "shm_goodput_ratio_to_tcp": f">= {MIN_GOODPUT}"},
        conditions={
            "payload": str(shape),
            "repetitions": repetitions,
            "cores": f"prefill on core {cores()[0]}, decode on core {cores()[1]}",
            "missing": [] if "nixl" in copies else ["nixl is not installed: pip install nixl==1.5.1"],
        },
        table=Table(
            title=f"{shape}: one host, median (min-max) of {repetitions}",
            columns=["medium", "MiB/s", "of tcp", "CPU s/GB: send", "receive", "both"],
            rows=[
                [
                    name,
                    spread([value / 2**20 for value in rate[name]], 0),
                    spread(ratios(rate[name], rate["tcp"])),
                    spread([copy.send_cpu_s / copy.num_bytes * 1e9 for copy in copies[name]]),
                    spread([copy.receive_cpu_s / copy.num_bytes * 1e9 for copy in copies[name]]),
                    spread(cpu[name]),
                ]
                for name in copies
            ],
        ),
    )


def _cpu_s_per_gb(copy: Copy) -> float:
    return (copy.send_cpu_s + copy.receive_cpu_s) / copy.num_bytes * 1e9
