"""The other paths: models, health, version, status, tokenize, metrics."""

from __future__ import annotations

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

import tollbridge
from tests.worker.support import Client, fake_serving, params
from tollbridge.transfer.base import TransferStatistics
from tollbridge.wire.status import WorkerStatus


async def test_models(client: Client) -> None:
    _, body = await client.get("/v1/models")
    answer = json.loads(body)
    assert answer["object"] == "list"
    assert [(card["id"], card["max_model_len"]) for card in answer["data"]] == [("fake", 128), ("alias", 128)]


@pytest.mark.parametrize("model", ["fake", "alias"])
async def test_both_names_are_served(client: Client, model: str) -> None:
    assert (await client.complete(model=model))["model"] == "fake"


async def test_health_and_version(client: Client) -> None:
    assert await client.get("/health") == (200, b"")
    assert json.loads((await client.get("/version"))[1]) == {"version": tollbridge.__version__}


async def test_status(client: Client) -> None:
    import msgspec

    _, body = await client.get("/tollbridge/status")
    status = msgspec.json.decode(body, type=WorkerStatus)
    assert (status.name, status.incarnation, status.kv, status.draining) == ("w0", "f00d", "127.0.0.1:7801", False)
    assert status.engine["num_blocks"] == 100
    assert status.transfer == {}


async def test_tokenize_and_back(client: Client) -> None:
    status, answer = await client.post("/tokenize", {"model": "fake", "prompt": "hi"})
    assert (status, answer) == (200, {"count": 2, "max_model_len": 128, "tokens": [104, 105], "token_strs": None})
    _, answer = await client.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]})
    assert answer["tokens"] == list(b"<user>hi<assistant>")
    _, answer = await client.post("/tokenize", {"prompt": "hi", "return_token_strs": True})
    assert answer["token_strs"] == ["h", "i"]
    _, answer = await client.post("/tokenize", {"prompt": ""})
    assert (answer["count"], answer["tokens"]) == (0, [])
    _, answer = await client.post("/detokenize", {"tokens": [104, 105]})
    assert answer == {"prompt": "hi"}
    _, answer = await client.post("/detokenize", {"tokens": []})
    assert answer == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/tokenize", {}, "either"),
        ("/tokenize", {"prompt": "a", "messages": []}, "either"),
        ("/tokenize", {"prompt": "a", "promt": "b"}, "prompt"),
        ("/detokenize", {"tokens": [256]}, "256"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
async def test_tokenize_refuses(client: Client, path: str, body: dict[str, object], word: str) -> None:
    status, answer = await client.post(path, body)
    assert status == 400
    assert word in answer["error"]["message"]


async def samples(client: Client) -> dict[tuple[str, str], float]:
    """Return every sample of /metrics by name and the values of its own labels, in the order of their names."""
    _, body = await client.get("/metrics")
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            assert sample.labels.items() >= {"model_name": "fake", "engine": "0"}.items()
            rest = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine", "le")}
            found.setdefault((sample.name, " ".join(rest.values())), sample.value)
    return found


async def test_metrics_of_requests(client: Client) -> None:
    await client.complete(max_tokens=4)
    await client.complete(max_tokens=4, kv_transfer_params=params("decode"))
    await client.post("/v1/completions", {"prompt": ""})
    seen = await samples(client)
    assert seen["vllm:time_to_first_token_seconds_count", ""] == 2
    assert seen["vllm:inter_token_latency_seconds_count", ""] == 6
    assert seen["vllm:request_time_per_output_token_seconds_count", ""] == 2
    assert seen["vllm:e2e_request_latency_seconds_count", ""] == 2
    assert seen["vllm:request_queue_time_seconds_sum", ""] == pytest.approx(0.02)
    assert seen["vllm:request_prefill_time_seconds_sum", ""] == pytest.approx(0.04)
    assert seen["vllm:request_decode_time_seconds_count", ""] == 2
    assert seen["vllm:request_success_total", "length"] == 2
    assert seen["vllm:request_success_total", "abort"] == 0
    assert seen["vllm:external_prefix_cache_queries_total", ""] == 4
    assert seen["vllm:external_prefix_cache_hits_total", ""] == 3
    assert seen["vllm:generation_tokens_total", ""] == 8
    assert seen["vllm:prompt_tokens_total", ""] == 10
    assert seen["vllm:prompt_tokens_by_source_total", "external_kv_transfer"] == 5
    assert seen["vllm:prompt_tokens_by_source_total", "local_cache_hit"] == 0
    assert seen["vllm:prefix_cache_queries_total", ""] == 12
    assert seen["vllm:prefix_cache_hits_total", ""] == 3
    assert seen["vllm:kv_cache_usage_perc", ""] == 0.25
    assert seen["vllm:num_requests_running", ""] == 0
    assert seen["vllm:num_requests_waiting", ""] == 0
    assert seen["vllm:num_preemptions_total", ""] == 0
    assert seen["vllm:cache_config_info", "16 float32 True 100"] == 1
    assert seen["tollbridge:kv_recomputed_tokens_total", ""] == 0
    assert seen["tollbridge:pinned_blocks", ""] == 0


async def test_metrics_of_transfers() -> None:
    sent = TransferStatistics(
        medium="tcp",
        active=2,
        done=3,
        failed=4,
        cancelled=1,
        payload_bytes=1000,
        wire_bytes=1100,
        num_connections=5,
        goodput_bytes_per_s=1e6,
        failures_by_reason={"checksum": 1, "stalled": 3},
        num_connections_by_medium={"tcp": 2, "shm": 3},
        payload_bytes_by_medium={"shm": 1000},
        pending_bytes=77,
    )
    async with fake_serving(transfers={"send": sent}) as client:
        seen = await samples(client)
        assert seen["tollbridge:transfer_active", "send"] == 2
        assert seen["tollbridge:transfer_connections", "tcp send"] == 2
        assert seen["tollbridge:transfer_connections", "shm send"] == 3
        assert seen["tollbridge:transfer_payload_bytes_total", "shm send"] == 1000
        assert seen["tollbridge:transfer_pending_bytes", "send"] == 77
        assert seen["tollbridge:transfer_wire_bytes_total", "send"] == 1100
        assert seen["tollbridge:transfer_goodput_bytes_per_second", "send"] == 1e6
        assert seen["tollbridge:transfer_ends_total", "done  send"] == 3
        assert seen["tollbridge:transfer_ends_total", "cancelled  send"] == 1
        assert seen["tollbridge:transfer_ends_total", "failed stalled send"] == 3
