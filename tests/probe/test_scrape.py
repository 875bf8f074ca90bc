from __future__ import annotations

from tollbridge.probe.scrape import Reading, read

VLLM = """# HELP vllm:num_requests_running Number of requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a } b"} 2.0
vllm:num_requests_waiting{engine="0",model_name="a } b"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 1.0
vllm:request_success_total{finished_reason="stop"} 3.0
vllm:request_success_total{finished_reason="length"} 4.0
vllm:request_prefill_time_seconds_bucket{le="0.3"} 7.0
vllm:request_prefill_time_seconds_sum{engine="0"} 1.25 1764000000000
vllm:request_prefill_time_seconds_count{engine="0"} 7.0
vllm:prefix_cache_hits_total{engine="0"} 96.0
process_start_time_seconds 1.7e9
nonsense
"""


def test_vllm() -> None:
    assert read(VLLM) == Reading(open=3, ended=7, prefill_s=1.25, num_prefills=7, cached_tokens=96)


def test_a_server_that_says_other_things() -> None:
    assert read("up 1\n") == Reading(open=0, ended=None, prefill_s=None, num_prefills=0, cached_tokens=None)
    assert read('sglang:num_running_reqs{model_name="m"} 2\nsglang:num_queue_reqs 3\n').open == 5
    assert read('tollbridge_router_requests_total{choice="local"} 2\n').is_router


def test_what_is_no_number_is_left_out() -> None:
    assert read("vllm:request_success_total NaN\nvllm:prefix_cache_hits_total +Inf") == read("")


def test_a_restart_shows() -> None:
    assert read("vllm:request_success_total 2").restarted_since(read("vllm:request_success_total 3"))
    assert not read("vllm:request_success_total 3").restarted_since(read("vllm:request_success_total 3"))
