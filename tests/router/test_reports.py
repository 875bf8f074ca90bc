"""What workers say about their load, in their own words."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.fake_engine import FakeEngine
from tollbridge.engine.base import EngineStatistics
from tollbridge.router.load import Report
from tollbridge.router.reports import from_metrics, from_status

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100",cpu_offload_gb="0"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="100",cpu_offload_gb="0"} 1.0
vllm:request_prompt_tokens_bucket{engine="0",le="1.0",model_name="m"} 0.0
vllm:request_prompt_tokens_count{engine="0",model_name="m"} 4.0
vllm:request_prompt_tokens_sum{engine="0",model_name="m"} 1200.0
some nonsense {{{
"""


def test_metrics_of_vllm() -> None:
    known = Report(kv_bytes_per_token=64.0)
    assert from_metrics(VLLM, known=known) == Report(
        block_size=16,
        kv_bytes_per_token=64.0,
        num_running=7,
        num_waiting=2,
        free_kv_tokens=1200 + 800,
        total_kv_tokens=3200,
        mean_prompt_tokens=300.0,
    )


def test_metrics_of_something_else() -> None:
    assert from_metrics(b"", known=Report()) is None
    assert from_metrics(b"\xff\xfe http_requests 3", known=Report()) is None
    assert from_metrics(b"vllm:num_requests_running{engine= 3", known=Report()) is None


def test_a_server_without_cache_config_has_unknown_room() -> None:
    told = from_metrics(b'vllm:num_requests_running{engine="0"} 1\n', known=Report())
    assert told is not None
    assert (told.num_running, told.free_kv_tokens, told.total_kv_tokens) == (1, None, None)


def test_status_of_our_worker() -> None:
    engine = EngineStatistics(
        num_running=2,
        num_waiting=3,
        num_parked=1,
        num_blocks=100,
        num_free_blocks=40,
        num_pinned_blocks=10,
        waiting_prefill_tokens=700,
        max_num_batched_tokens=512,
    )
    status = {
        "block_size": 16,
        "kv_bytes_per_token": 64,
        "engine": dataclasses.asdict(engine),
        "transfer": {"send": {"active": 2, "pending_bytes": 900, "medium": "tcp"}},
    }
    assert from_status(status) == Report(
        block_size=16,
        kv_bytes_per_token=64.0,
        max_num_batched_tokens=512,
        num_running=2,
        num_waiting=4,
        waiting_prefill_tokens=700,
        free_kv_tokens=640,
        total_kv_tokens=1600,
        pinned_tokens=160,
        num_sending=2,
        sending_bytes=900.0,
    )


def test_a_strange_status_says_nothing() -> None:
    assert from_status({"engine": "nonsense"}) is None
    assert from_status({}) == Report(waiting_prefill_tokens=None)


@pytest.mark.parametrize(
    ("engine", "full"),
    [
        ({"num_pinned_blocks": 31, "max_pinned_blocks": 32}, False),
        ({"num_pinned_blocks": 32, "max_pinned_blocks": 32}, True),
        ({"num_pinned_blocks": 0, "max_pinned_blocks": 0}, False),  # pins nothing: there is nothing to wait for
        ({"num_pinned_blocks": 5}, False),  # a worker that does not say
    ],
)
def test_the_pinned_bound(engine: dict[str, int], full: bool) -> None:
    told = from_status({"engine": engine})
    assert told is not None
    assert told.pinned_full is full


@pytest.mark.parametrize(("pinned", "full"), [(31, False), (32, True)])
def test_our_connector_says_what_waits_and_what_is_pinned(pinned: int, full: bool) -> None:
    text = f"""vllm:num_requests_running{{engine="0"}} 1.0
vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="64"}} 1.0
vllm:tollbridge_pinned_blocks{{engine="0"}} {pinned}.0
vllm:tollbridge_max_pinned_blocks{{engine="0"}} 32.0
vllm:tollbridge_waiting_prefill_tokens{{engine="0"}} 700.0
"""
    told = from_metrics(text.encode(), known=Report())
    assert told is not None
    assert (told.pinned_tokens, told.pinned_full, told.waiting_prefill_tokens) == (16 * pinned, full, 700)


def test_our_connector_says_once_what_a_token_weighs_and_what_a_step_takes() -> None:
    text = """vllm:num_requests_running{engine="0"} 1.0
vllm:tollbridge_kv_bytes_per_token{engine="0"} 2048.0
vllm:tollbridge_kv_bytes_per_token{engine="1"} 2048.0
vllm:tollbridge_max_num_batched_tokens{engine="0"} 500.0
"""
    told = from_metrics(text.encode(), known=Report())
    assert told is not None
    assert (told.kv_bytes_per_token, told.max_num_batched_tokens) == (2048.0, 500)
    later = from_metrics(b'vllm:num_requests_running{engine="0"} 1.0\n', known=told)
    assert later is not None
    assert (later.kv_bytes_per_token, later.max_num_batched_tokens) == (2048.0, 500)


def test_the_fake_engine_speaks_the_same_words() -> None:
    told = from_status({"engine": dataclasses.asdict(FakeEngine().statistics())})
    assert told is not None


@pytest.mark.parametrize(("label", "caches"), [("True", True), ("False", False)])
def test_a_server_says_whether_it_keeps_prefixes(label: str, caches: bool) -> None:
    text = f'vllm:cache_config_info{{block_size="16",enable_prefix_caching="{label}",num_gpu_blocks="9"}} 1.0\n'
    told = from_metrics(text.encode(), known=Report())
    assert told is not None and told.caches_prefixes is caches
