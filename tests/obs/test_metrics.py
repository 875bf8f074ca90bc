"""Names, labels and counts of a worker's metrics."""

from __future__ import annotations

from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tollbridge.obs.metrics import WorkerMetrics


def samples(metrics: WorkerMetrics) -> dict[tuple[str, str], float]:
    found = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            rest = [v for k, v in sample.labels.items() if k not in ("model_name", "engine")]
            found[sample.name, " ".join(rest)] = sample.value
    return found


def test_every_series_is_there_from_the_start() -> None:
    seen = samples(WorkerMetrics("m"))
    for name in (
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:request_time_per_output_token_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds",
    ):
        assert seen[name + "_count", ""] == 0
    for reason in ("stop", "length", "abort", "error"):
        assert seen["vllm:request_success_total", reason] == 0
    assert seen["tollbridge:transfer_seconds_count", "send"] == 0


def test_two_processes_in_one_test_do_not_share_a_registry() -> None:
    one, other = WorkerMetrics("m"), WorkerMetrics("m")
    one.first_token(0.5)
    assert samples(one)["vllm:time_to_first_token_seconds_count", ""] == 1
    assert samples(other)["vllm:time_to_first_token_seconds_count", ""] == 0
    assert b"vllm:" not in generate_latest(REGISTRY)


def test_tpot_needs_a_second_token() -> None:
    metrics = WorkerMetrics("m")
    metrics.reported(queue_s=0, prefill_s=0, decode_s=0, generated_tokens=1)
    metrics.reported(queue_s=0, prefill_s=0, decode_s=1.0, generated_tokens=5)
    seen = samples(metrics)
    assert seen["vllm:request_time_per_output_token_seconds_count", ""] == 1
    assert seen["vllm:request_time_per_output_token_seconds_sum", ""] == 0.25


def test_only_requests_that_ended_well_have_a_latency() -> None:
    metrics = WorkerMetrics("m")
    for reason in ("stop", "length", "abort", "error"):
        metrics.finished(reason, e2e_s=1.0)
    seen = samples(metrics)
    assert seen["vllm:e2e_request_latency_seconds_count", ""] == 2
    assert seen["vllm:request_success_total", "error"] == 1
