"""Figures of a group of windows: what crossed the wire, whoever tells of it."""

from __future__ import annotations

import math

from tollbridge.bench.figures import METRICS, as_vllm, select
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


def test_peaks_as_vllm_counts_them() -> None:
    def request(index: int, block: int, sent_s: float, gaps: list[float], failure: str = "") -> Sample:
        return Sample(
            cell="c", block=block, arm="one", index=index, group="request", at_s=sent_s, sent_s=sent_s, ttft_s=0.1,
            num_prompt_tokens=8, max_tokens=9, gaps_s=gaps, num_tokens=1 + len(gaps), failure=failure,
        )  # fmt: skip

    samples = [
        request(0, 0, 0.0, [0.2, 0.2, 0.9]),  # tokens at 0.1, 0.3, 0.5, 1.4
        request(1, 0, 0.2, [0.1]),  # at 0.3, 0.4: five in the first second
        request(2, 1, 0.2, [0.1]),  # another window
        request(3, 0, 0.35, [], failure="cut_short"),
    ]
    figures = as_vllm(select(samples, [window("one")], arm="one"))
    assert figures["max_output_tokens_per_s"] == 5.0
    assert figures["max_concurrent_requests"] == 3  # the failed one was under way, too
    assert (figures["num_prompts"], figures["completed"]) == (4, 3)
    nobody = as_vllm(select([], [window("one")], arm="one"))
    assert (nobody["max_output_tokens_per_s"], nobody["max_concurrent_requests"]) == (0.0, 0)
