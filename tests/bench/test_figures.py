"""Figures of a group of windows: what crossed the wire, whoever tells of it."""

from __future__ import annotations

import math

from tollbridge.bench.figures import METRICS, select
from tollbridge.bench.records import Sample, Window

LOADS = {"vllm:tollbridge_load_bytes": 4e6, "vllm:tollbridge_load_wire_seconds": 0.5}


def window(arm: str, **counters: float) -> Window:
    return Window(cell="c", block=0, arm=arm, duration_s=1.0, num_requests=2, counters={"d0": counters, "p0": {}})


def sample(index: int, wire_bytes: int) -> Sample:
    return Sample(
        cell="c", block=0, arm="split", index=index, group="request", at_s=0.0, sent_s=0.0, num_prompt_tokens=8,
        max_tokens=2, ttft_s=0.1, wire_bytes=wire_bytes, wire_s=0.25,
    )  # fmt: skip


def test_kv_on_the_wire_by_requests_by_counters_or_by_nobody() -> None:
    counters = {
        f"{name}_{end}": value for name, total in LOADS.items() for end, value in (("sum", total), ("count", 2))
    }
    windows = [window("split", **counters), window("one")]
    by_requests = select([sample(0, 1_000_000), sample(1, 3_000_000)], windows, arm="split")
    assert by_requests.wire() == (2e6, 0.25)
    by_counters = select([sample(0, 0)], windows, arm="split")  # vLLM's streams carry no report
    assert by_counters.wire() == (2e6, 0.25) and METRICS["kv_mb_per_split"](by_counters) == 2.0
    assert all(map(math.isnan, select([], windows, arm="one").wire()))
