"""Does the prefill worker's memory stay bounded, whatever waits for the link?

The prefill process, its 286 MB cache prefaulted, runs in a memory control group with a limit of 3,584 MiB, under which
the prefill worker of a published experiment was killed. 1, 8 and 64 requests of 273 MB, whose blocks alias that one
cache, are sent at once over a 4.6 Gb/s link. The group's peak (the kernel's socket buffers included where the group
counts them) may exceed what the idle process held by the rings, of which this medium has none, and 64 MiB.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.support.cgroup import MemoryGauge, limited
from benchmarks.support.kv_pair import KVPair, kv_pair
from benchmarks.support.kv_shape import KVShape
from benchmarks.support.result import ClaimResult, Table, unavailable
from benchmarks.support.svg import line_chart
from tollbridge.bench.netns import LinkUnavailableError, link

DESCRIPTION = "Prefill's memory stays under idle + ring + 64 MiB at 1, 8 and 64 concurrent 273 MB requests"

COUNTS = (1, 8, 64)
LIMIT_BYTES = 3584 * 2**20
RING_BYTES = 0  # host memory goes to the wire from the cache itself
MAX_ABOVE_BYTES = RING_BYTES + 64 * 2**20
RATE = "4600mbit"
SAMPLE_S = 0.02
PLOT = Path(__file__).parents[2] / "docs" / "results" / "transfer-memory.svg"

Samples = list[tuple[float, float]]  # (seconds since the start, MiB above idle)


def run(quick: bool) -> ClaimResult:
    """Measure each concurrency once per repetition; the plot shows the last one of each."""
    repetitions, shape = (1 if quick else 7), KVShape()
    above: dict[int, list[float]] = {count: [] for count in COUNTS}
    samples: dict[int, Samples] = {}
    try:
        with link(RATE) as joined, kv_pair(joined, shape, prefill_group=group) as pair:
            gauge = pair.gauge
            assert gauge is not None
            pair.kv(count=2)  # what is imported and allocated on first use is there now
            for repetition in range(repetitions):
                for count in COUNTS[repetition % 3 :] + COUNTS[: repetition % 3]:
                    peak, samples[count] = _watch(pair, gauge, count)
                    above[count].append(peak)
            idle_mib = gauge.now() / 2**20
    except LinkUnavailableError as error:
        return unavailable(str(error))
    figures = {f"peak_above_idle_mib_{count}": max(above[count]) for count in COUNTS}
    plot = _plot(samples) if not quick else "not written by quick runs"
    limit_mib = MAX_ABOVE_BYTES / 2**20
    return ClaimResult(
        holds=all(value <= limit_mib for value in figures.values()),
        figures={**figures, "idle_mib": idle_mib, "above_idle_mib": {str(n): above[n] for n in COUNTS}},
        bounds=dict.fromkeys(figures, f"<= {limit_mib:g}"),
        conditions={
            "payload": f"each {shape}, all aliasing one cache",
            "link": f"{RATE}, tc tbf",
            "repetitions": repetitions,
            "measured_by": gauge.source,
            "limit_mib": LIMIT_BYTES // 2**20,
            "ring_mib": RING_BYTES // 2**20,
            "plot": plot,
        },
        table=Table(
            title=f"Prefill's memory ({gauge.source})",
            columns=["concurrent", "peak above idle, MiB: median", "worst", "must be"],
            rows=[
                [str(n), f"{statistics.median(above[n]):.1f}", f"{max(above[n]):.1f}", f"<= {limit_mib:g}"]
                for n in COUNTS
            ],
        ),
    )


@contextmanager
def group(pid: int) -> Iterator[MemoryGauge]:
    """Put the prefill process under the limit."""
    with limited(pid, LIMIT_BYTES) as gauge:
        yield gauge


def _watch(pair: KVPair, gauge: MemoryGauge, count: int) -> tuple[float, Samples]:
    """Send `count` requests at once; return the peak above idle in MiB, and the samples."""
    time.sleep(0.5)  # what the last transfers held is freed
    idle = gauge.now()
    gauge.reset()
    samples: Samples = []
    begun_s, stop = time.monotonic(), threading.Event()

    def sample() -> None:
        while not stop.wait(SAMPLE_S):
            samples.append((time.monotonic() - begun_s, (gauge.now() - idle) / 2**20))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        pair.kv(count=count)
    finally:
        stop.set()
        sampler.join()
    return (gauge.peak() - idle) / 2**20, samples


def _plot(samples: dict[int, Samples]) -> str:
    limit = {f"ring + 64 MiB = {MAX_ABOVE_BYTES / 2**20:g} MiB": MAX_ABOVE_BYTES / 2**20}
    lines = {f"{count} concurrent": _thinned(samples[count]) for count in COUNTS}
    title = "Prefill worker: memory above idle while 273 MB requests cross 4.6 Gb/s"
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    PLOT.write_text(line_chart(title, "seconds", "MiB above idle", lines, limit))
    return str(PLOT.relative_to(PLOT.parents[2]))


def _thinned(samples: Samples, at_most: int = 400) -> Samples:
    """Return the maxima of up to `at_most` equal runs of `samples`."""
    size = -(-len(samples) // at_most) or 1
    runs = [samples[start : start + size] for start in range(0, len(samples), size)]
    return [(run[0][0], max(value for _, value in run)) for run in runs]
