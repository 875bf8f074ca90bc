"""Two real workers with a tiny model: the `openai` client, a split by hand, events, metrics."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from tests.worker.process import Worker
from tests.worker.support import params
from tollbridge.wire.events import DECODER, BlockStored

PROMPT = [(index * 7) % 400 + 10 for index in range(100)]


@pytest.fixture(scope="module")
def workers(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Worker, Worker]]:
    folder = tmp_path_factory.mktemp("workers")
    pair = Worker(folder / "p.log", model=tiny_model_dir), Worker(folder / "d.log", model=tiny_model_dir, cores=[0])
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Worker.ready, pair))
        yield pair
    finally:
        with ThreadPoolExecutor() as pool:
            codes = list(pool.map(Worker.stop, pair))
    assert codes == [0, 0]


@pytest.fixture
def p(workers: tuple[Worker, Worker]) -> Worker:
    return workers[0]


@pytest.fixture
def d(workers: tuple[Worker, Worker]) -> Worker:
    return workers[1]


@pytest.fixture
def client(p: Worker) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=p.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


async def post(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        return response.status, await response.json()


async def get(url: str) -> bytes:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return await response.read()


def test_ready_line(p: Worker, d: Worker) -> None:
    assert p.said["ready"] == "worker"
    assert p.said["pid"] == p.process.pid
    assert int(p.said["kv"].rpartition(":")[2]) > 0
    assert p.said["incarnation"] != d.said["incarnation"]


def test_cores(d: Worker) -> None:
    assert os.sched_getaffinity(d.process.pid) == {0}


def test_completions_by_the_openai_client(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    ask: dict[str, Any] = {"model": model, "prompt": "the bridge keeper", "max_tokens": 9, "temperature": 0}
    whole = client.completions.create(**ask)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 9
    chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 9
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_chat_by_the_openai_client(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": "What is the toll?"}],
        "max_completion_tokens": 9,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content for c in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_errors_by_the_openai_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="nobody", prompt="a")
    with pytest.raises(openai.BadRequestError, match="unknown role martian"):
        messages: Any = [{"role": "martian", "content": "a"}]
        client.chat.completions.create(model=client.models.list().data[0].id, messages=messages)


async def test_stop_string(p: Worker) -> None:
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    _, whole = await post(p.url + "/v1/completions", body)
    text = whole["choices"][0]["text"]
    stop = text[5:8]
    _, cut = await post(p.url + "/v1/completions", {**body, "stop": stop})
    assert cut["choices"][0]["text"] == text[: text.index(stop)]
    assert (cut["choices"][0]["finish_reason"], cut["choices"][0]["stop_reason"]) == ("stop", stop)


async def test_second_time_is_cached(p: Worker) -> None:
    for _ in range(2):
        _, answer = await post(p.url + "/v1/completions", {"prompt": PROMPT[::-1], "max_tokens": 2})
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


async def test_tokenize_and_back(p: Worker) -> None:
    _, answer = await post(p.url + "/tokenize", {"prompt": "a heavy cart"})
    assert answer["count"] == len(answer["tokens"])
    assert await post(p.url + "/detokenize", {"tokens": answer["tokens"]}) == (200, {"prompt": "a heavy cart"})


async def split(p: Worker, d: Worker, prompt: list[int], transfer_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Send both legs at once, as the router does."""
    host, port = p.said["kv"].split(":")
    common = {"prompt": prompt, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    legs = [
        {
            **common,
            "max_tokens": tokens,
            "kv_transfer_params": params(role, transfer_id=transfer_id, host=host, port=int(port)),
        }
        for role, tokens in (("prefill", 1), ("decode", 10))
    ]
    (_, prefill), (_, decode) = await asyncio.gather(
        post(p.url + "/v1/completions", legs[0]), post(d.url + "/v1/completions", legs[1])
    )
    return prefill, decode


async def test_split_equals_local_and_says_what_it_moved(p: Worker, d: Worker) -> None:
    prompt = [token + 1 for token in PROMPT]
    prefill, decode = await split(p, d, prompt, "a" * 32)
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 10, "return_token_ids": True, "ignore_eos": True}
    _, local = await post(p.url + "/v1/completions", body)
    assert decode["choices"][0]["token_ids"] == local["choices"][0]["token_ids"]
    said = decode["kv_transfer_params"]["tollbridge"]
    assert said["transfer"]["outcome"] == "done", said
    assert (said["role"], said["loaded_tokens"], said["computed_tokens"]) == ("decode", 99, 1)
    assert prefill["kv_transfer_params"]["tollbridge"]["role"] == "prefill"
    assert decode["usage"]["prompt_tokens_details"]["cached_tokens"] == 99

    status = json.loads(await get(d.url + "/tollbridge/status"))
    assert status["transfer"]["receive"]["done"] == 1
    assert status["engine"]["prompt_tokens_by_source"]["external_kv_transfer"] == 99
    samples = {
        (sample.name, sample.labels.get("source") or sample.labels.get("side", "")): sample.value
        for family in text_string_to_metric_families((await get(d.url + "/metrics")).decode())
        for sample in family.samples
    }
    assert samples["vllm:external_prefix_cache_hits_total", ""] == 99
    assert samples["vllm:prompt_tokens_by_source_total", "external_kv_transfer"] == 99
    assert samples["tollbridge:transfer_payload_bytes_total", "receive"] == 99 * status["kv_bytes_per_token"]
    assert samples["tollbridge:transfer_seconds_count", "receive"] == 1


async def test_events_name_the_blocks(p: Worker) -> None:
    context = zmq.Context()
    asker = context.socket(zmq.DEALER)
    try:
        status = json.loads(await get(p.url + "/tollbridge/status"))
        asker.connect(status["replay"])
        prompt = [token + 2 for token in PROMPT]
        await post(p.url + "/v1/completions", {"prompt": prompt, "max_tokens": 1})
        stored: list[int] = []
        async with asyncio.timeout(60):
            while stored[:96] != prompt[:96]:
                asker.send_multipart([b"", (0).to_bytes(8, "big")])
                stored = await asyncio.to_thread(_stored_tokens, asker, prompt[0])
    finally:
        asker.close(linger=0)
        context.term()


def _stored_tokens(asker: zmq.Socket[bytes], first_token: int) -> list[int]:
    """Return the tokens stored since the block that begins with `first_token`."""
    stored: list[int] = []
    while True:
        assert asker.poll(60_000)
        payload = asker.recv_multipart()[-1]
        if not payload:
            return stored
        for event in DECODER.decode(payload).events:
            if isinstance(event, BlockStored) and (stored or event.token_ids[0] == first_token):
                stored += event.token_ids
