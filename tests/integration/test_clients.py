"""The real `openai` client against router and worker, and bad input at both doors."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from tests.support.stack import Stack, get, post, running
from tests.support.timing import TRIES


@pytest.fixture(scope="module")
def stack(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    with running(Stack(tmp_path_factory.mktemp("clients"), str(tiny_model_dir))) as running_stack:
        yield running_stack


@pytest.fixture(params=["router", "router-split", "worker"])
def client(request: pytest.FixtureRequest, stack: Stack):
    base = stack.worker_url("d0") if request.param == "worker" else stack.url
    headers = {"x-tollbridge-policy": "split"} if request.param == "router-split" else {}
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none", default_headers=headers, max_retries=0) as made:
        yield made


@pytest.fixture
def model(stack: Stack) -> str:
    return str(json.loads(get(stack.url + "/v1/models"))["data"][0]["id"])


MESSAGES = [{"role": "user", "content": "Say something about bridges, tolls and the people who pay them."}]


def test_chat(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=8, temperature=0)  # type: ignore[arg-type]
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_stream_equals_the_whole_answer(client: openai.OpenAI, model: str) -> None:
    ask = {"model": model, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**ask)  # type: ignore[call-overload]
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_completions_stream(client: openai.OpenAI, model: str) -> None:
    ask = {"model": model, "prompt": "the toll of the bridge", "max_tokens": 10, "temperature": 0}
    whole = client.completions.create(**ask)  # type: ignore[call-overload]
    chunks = list(client.completions.create(**ask, stream=True))  # type: ignore[call-overload]
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert client.models.list().data[0].id == model


def test_responses(client: openai.OpenAI, model: str) -> None:
    """The same text as the chat of the same meaning, whole and by events."""
    asked: dict[str, Any] = {"model": model, "max_output_tokens": 9, "temperature": 0, "instructions": "Be brief."}
    whole = client.responses.create(input="What is a toll?", **asked)
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a toll?"}]
    chat = client.chat.completions.create(model=model, messages=messages, max_tokens=9, temperature=0)
    assert whole.output_text == chat.choices[0].message.content
    assert (whole.status, whole.usage.output_tokens) == ("incomplete", 9)  # type: ignore[union-attr]
    events = list(client.responses.create(input=messages[1:], stream=True, **asked))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text
    again = [messages[1], *(item.model_dump() for item in whole.output), {"role": "user", "content": "And now?"}]
    assert client.responses.create(input=again, **asked).usage.input_tokens > whole.usage.input_tokens  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(input="More", previous_response_id=whole.id, **asked)


def test_a_tool_that_must_be_called(client: openai.OpenAI, model: str) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    asked: dict[str, Any] = {"model": model, "messages": MESSAGES, "tools": [tool], "tool_choice": choice, "seed": 1}
    whole = client.chat.completions.create(**asked, max_tokens=200).choices[0]
    (call,) = whole.message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, whole.finish_reason) == ("weather", "stop")
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    chunks = list(client.chat.completions.create(**asked, max_tokens=200, stream=True))
    (called,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert called.function is not None and called.function.name == "weather"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_nothing_internal_reaches_the_client(stack: Stack, model: str) -> None:
    body = {"model": model, "prompt": list(range(10, 60)), "max_tokens": 3, "stream": True}
    for policy in ("local", "split"):
        raw = post(stack.url + "/v1/completions", body, headers={"x-tollbridge-policy": policy}).raw
        assert raw.endswith(b"data: [DONE]\n\n")
        assert b"kv_transfer_params" not in raw


BAD = {
    "invalid json": (b'{"prompt": ', 400, "json"),
    "not an object": (b"[1, 2]", 400, "object"),
    "unknown model": ({"model": "no-such-model", "prompt": "a"}, 404, "no-such-model"),
    "too long a prompt": ({"prompt": [5] * 100_000, "max_tokens": 1}, 400, "100000"),
    "negative max_tokens": ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    "empty prompt": ({"prompt": ""}, 400, "prompt"),
    "empty ids": ({"prompt": []}, 400, "prompt"),
    "out of vocabulary": ({"prompt": [5, 10**6]}, 400, "1000000"),
    "negative id": ({"prompt": [5, -3]}, 400, "-3"),
    "10 MB": (b'{"prompt": "' + b"a" * (10 << 20) + b'"}', 413, "MiB"),
    "wrong type": ({"prompt": "a", "max_tokens": "many"}, 400, "max_tokens"),
    "unknown parameter": ({"prompt": "a", "max_token": 3}, 400, "max_token"),
    "temperature": ({"prompt": "a", "temperature": -1}, 400, "temperature"),
}


@pytest.mark.parametrize("door", ["router", "worker"])
@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_sentence_and_the_engine_goes_on(stack: Stack, case: str, door: str) -> None:
    base = stack.url if door == "router" else stack.worker_url("d0")
    body, status, word = BAD[case]
    answer = post(base + "/v1/completions", body)
    assert answer.status == status, answer.raw
    error = answer.json["error"]
    assert word.lower() in error["message"].lower()
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    assert post(base + "/v1/completions", {"prompt": "still here", "max_tokens": 2}).status == 200


def test_client_that_leaves_frees_everything(stack: Stack) -> None:
    """A disconnect cancels both legs; no block stays behind on either worker."""
    host, port = urlsplit(stack.url).netloc.split(":")
    body = json.dumps({"prompt": [7] * 1500, "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-tollbridge-policy: split\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        connection.recv(1)  # headers have come: both legs are under way
    for name in ("p0", "d0"):
        wait_idle(stack, name)


def wait_idle(stack: Stack, name: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        status = json.loads(get(stack.worker_url(name) + "/tollbridge/status"))["engine"]
        busy = status["num_running"] + status["num_waiting"] + status["num_parked"] + status["num_pinned_blocks"]
        if busy == 0 and status["num_free_blocks"] == status["num_blocks"]:
            return
        time.sleep(0.05)
    raise AssertionError(f"{name} is not idle: {status}")


@pytest.mark.parametrize("policy", ["local", "split"])
def test_a_client_that_hangs_up_frees_the_engine_within_a_step(stack: Stack, policy: str) -> None:
    """One step plus 100 ms; the machine may be busy."""
    workers = [stack.worker_url(name) for name in ("p0", "d0")]
    taken_s = (_hang_up(stack.url, workers, policy) for _ in range(TRIES))
    assert any(each_s < 0.1 + STEP_S for each_s in taken_s)


STEP_S = 0.05  # of the tiny model: a few milliseconds, and what it takes to ask for the metrics


def _hang_up(url: str, workers: list[str], policy: str) -> float:
    """Return the seconds from a client's end in the middle of its stream until no engine runs anything."""
    body = json.dumps({"prompt": list(range(10, 60)), "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port), timeout=120) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-tollbridge-policy: %b\r\nContent-Length: %d\r\n\r\n%b"
            % (policy.encode(), len(body), body)
        )
        said = b""
        while said.count(b"data: ") < 3:
            said += client.recv(1 << 16)
        assert b"[DONE]" not in said
    start_s = time.monotonic()
    while any(_num_running(worker) for worker in workers):
        assert time.monotonic() < start_s + 120
    return time.monotonic() - start_s


def _num_running(worker: str) -> float:
    lines = get(worker + "/metrics").decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))
