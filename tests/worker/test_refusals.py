"""Bad input: one sentence in OpenAI's shape, nothing reaches the engine, and the next request is served."""

from __future__ import annotations

import pytest

from tests.worker.support import Client, fake_serving, params

COMPLETIONS = {
    "no body": (b"", 400, "byte 0"),
    "cut off": (b'{"prompt": ', 400, "byte 11"),
    "not JSON": (b"{prompt: 1}", 400, "byte 1"),
    "trailing": (b'{"prompt": "a"} x', 400, "trailing characters (byte 17)"),
    "not an object": (b"[1]", 400, "object"),
    "not UTF-8": (b'{"prompt": "\xff"}', 400, "UTF-8"),
    "half a surrogate": (b'{"prompt": "\\ud800 and more text"}', 400, "JSON"),
    "deep": (b'{"kv_transfer_params": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001, 400, "deep"),
    "deep and unknown": (b'{"prompt": "a", "user": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "deep"),
    "unknown model": ({"model": "nobody", "prompt": "a"}, 404, "`nobody`"),
    "no prompt": ({"max_tokens": 1}, 400, "prompt"),
    "null prompt": ({"prompt": None}, 400, "prompt"),
    "empty prompt": ({"prompt": ""}, 400, "empty"),
    "empty ids": ({"prompt": []}, 400, "empty"),
    "empty text in a list": ({"prompt": [""]}, 400, "empty"),
    "empty ids in a list": ({"prompt": [[1], []]}, 400, "empty"),
    "too many prompts": ({"prompt": ["a"] * 65, "n": 2}, 400, "at most 128"),
    "mixed": ({"prompt": ["a", 1]}, 400, "mixes"),
    "mixed deeper": ({"prompt": [[1], "a"]}, 400, "mixes"),
    "id too large": ({"prompt": [1, 256]}, 400, "Token id 256 is not in the vocabulary: it has 256 tokens"),
    "id beyond 64 bits": ({"prompt": [10**30]}, 400, "vocabulary"),
    "negative id": ({"prompt": [-1]}, 400, "-1"),
    "too long a prompt": ({"prompt": [1] * 128, "max_tokens": 1}, 400, "maximum context length is 128 tokens"),
    "too much output": ({"prompt": [1] * 100, "max_tokens": 29}, 400, "(29 > 128 - 100)"),
    "max_tokens 0": ({"prompt": "a", "max_tokens": 0}, 400, '"max_tokens" must be at least 1'),
    "max_tokens -1": ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    "max_tokens text": ({"prompt": "a", "max_tokens": "2"}, 400, "max_tokens"),
    "max_tokens fraction": ({"prompt": "a", "max_tokens": 1.5}, 400, "max_tokens"),
    "temperature": ({"prompt": "a", "temperature": -0.1}, 400, "temperature"),
    "top_p 0": ({"prompt": "a", "top_p": 0}, 400, "top_p"),
    "top_p 2": ({"prompt": "a", "top_p": 2}, 400, "top_p"),
    "top_k": ({"prompt": "a", "top_k": -2}, 400, "top_k"),
    "seed": ({"prompt": "a", "seed": 1 << 63}, 400, "seed"),
    "stop empty": ({"prompt": "a", "stop": ["x", ""]}, 400, "stop"),
    "stop many": ({"prompt": "a", "stop": ["x"] * 33}, 400, "33"),
    "stop type": ({"prompt": "a", "stop": [1]}, 400, "stop[0]"),
    "stop id": ({"prompt": "a", "stop_token_ids": [999]}, 400, "999"),
    "n 0": ({"prompt": "a", "n": 0}, 400, '"n"'),
    "n many": ({"prompt": "a", "n": 129}, 400, '"n"'),
    "min_p": ({"prompt": "a", "min_p": 1.1}, 400, "min_p"),
    "presence": ({"prompt": "a", "presence_penalty": 2.1}, 400, "presence_penalty"),
    "frequency": ({"prompt": "a", "frequency_penalty": -3}, 400, "frequency_penalty"),
    "repetition": ({"prompt": "a", "repetition_penalty": 0}, 400, "repetition_penalty"),
    "repetition beyond float32": ({"prompt": "a", "repetition_penalty": 1e-320}, 400, "repetition_penalty"),
    "huge repetition": ({"prompt": "a", "repetition_penalty": 1e300}, 400, "repetition_penalty"),
    "min_tokens": ({"prompt": "a", "max_tokens": 2, "min_tokens": 3}, 400, "min_tokens"),
    "min_tokens -1": ({"prompt": "a", "min_tokens": -1}, 400, "min_tokens"),
    "bias of text": ({"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias"),
    "bias of a stranger": ({"prompt": "a", "logit_bias": {"256": 1}}, 400, "256"),
    "bias of a stranger behind zeros": ({"prompt": "a", "logit_bias": {"0" * 20 + "999999": 1}}, 400, "token ids"),
    "bias of many": ({"prompt": "a", "logit_bias": {f"{at:05}": 1 for at in range(1025)}}, 400, "at most 1024"),
    "bias type": ({"prompt": "a", "logit_bias": {"2": "1"}}, 400, "logit_bias"),
    "allowed id": ({"prompt": "a", "allowed_token_ids": [256]}, 400, "allowed_token_ids"),
    "many allowed": ({"prompt": "a", "allowed_token_ids": [1] * 1025}, 400, "at most 1024"),
    "nothing allowed": ({"prompt": "a", "allowed_token_ids": []}, 400, "allowed_token_ids"),
    "bad word": ({"prompt": "a", "bad_words": [" "]}, 400, "bad_words"),
    "bad words": ({"prompt": "a", "bad_words": ["x"] * 129}, 400, "bad_words"),
    "continued": ({"prompt": "a", "continued_tokens": -1}, 400, "continued_tokens"),
    "format": ({"prompt": "a", "response_format": {"type": "xml"}}, 400, "response_format"),
    "no schema": ({"prompt": "a", "response_format": {"type": "json_schema"}}, 400, "schema"),
    "two structures": (
        {"prompt": "a", "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        400,
        "either",
    ),
    "no structure": ({"prompt": "a", "structured_outputs": {}}, 400, "structured_outputs"),
    "two in one": ({"prompt": "a", "structured_outputs": {"regex": "a", "choice": ["b"]}}, 400, "must have one"),
    "structural tag": ({"prompt": "a", "structured_outputs": {"structural_tag": "a"}}, 400, "structural_tag"),
    "nonsense": ({"prompt": "a", "structured_outputs": {"regex": "nonsense"}}, 400, "nonsense"),
    "salt": ({"prompt": "a", "cache_salt": ""}, 400, "cache_salt"),
    "usage without stream": ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    "stream option": ({"prompt": "a", "stream": True, "stream_options": {"usage": True}}, 400, "usage"),
    "unsupported": ({"prompt": "a", "best_of": 2}, 400, '"best_of" is not supported by the embedded engine'),
    "logprobs of a chat": ({"prompt": "a", "logprobs": True}, 400, "logprobs"),
    "many logprobs": ({"prompt": "a", "logprobs": 21}, 400, "within 0 and 20"),
    "prompt_logprobs": ({"prompt": "a", "prompt_logprobs": -1}, 400, "prompt_logprobs"),
    "prompt_logprobs in a stream": ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
    "misspelt": ({"prompt": "a", "max_token": 2}, 400, 'did you mean "max_tokens"?'),
    "misspelt null": ({"prompt": "a", "temprature": None}, 400, 'did you mean "temperature"?'),
    "of the other path": ({"prompt": "a", "messages": []}, 400, '"messages" is not known'),
    "stranger": ({"prompt": "a", "zzzzzzzz": 2}, 400, "leave it out"),
    "stranger of length": ({"prompt": "a", "z" * 5000: 2}, 400, "…"),
    "stock vLLM params": ({"prompt": "a", "kv_transfer_params": {"do_remote_decode": True}}, 400, "tollbridge"),
    "params of no shape": ({"prompt": "a", "kv_transfer_params": {"tollbridge": 3}}, 400, "malformed"),
    "10 MB": (b'{"prompt": "' + b"a" * 10_000_000 + b'"}', 413, "4 MiB"),
}


@pytest.mark.parametrize("case", COMPLETIONS)
async def test_completions(client: Client, case: str) -> None:
    body, status, words = COMPLETIONS[case]
    answered, answer = await client.post("/v1/completions", body)
    assert answered == status, answer
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"]
    assert error["code"] == status
    assert len(error["message"]) < 400
    assert client.engine.submitted == []
    assert client.door.num_open == 0
    await client.complete()


CHAT = {
    "no messages": ({}, "messages"),
    "empty messages": ({"messages": []}, "empty"),
    "no role": ({"messages": [{"content": "a"}]}, "role"),
    "no content": ({"messages": [{"role": "user"}]}, "content"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    "odd part": ({"messages": [{"role": "user", "content": ["text"]}]}, "str"),
    "template": ({"messages": [{"role": "martian", "content": "a"}]}, "martian"),
    "tools": ({"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools"),
    "too long": ({"messages": [{"role": "user", "content": "a" * 200}]}, "maximum context length"),
    "too long a text": ({"messages": [{"role": "user", "content": "a" * 20_000}]}, "maximum context length"),
    "too long a role": ({"messages": [{"role": "a" * 20_000, "content": "a"}]}, "maximum context length"),
    "too long variables": (
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": "a" * 20_000}},
        "maximum context length",
    ),
    "too many messages": ({"messages": [{"role": "user", "content": ""}] * 200}, "at least 200"),
    "tool calls": ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}]}, "tool_calls"),
    "top_logprobs alone": ({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, "logprobs"),
    "echo": ({"messages": [{"role": "user", "content": "a"}], "echo": True}, "echo"),
    "max_completion_tokens": (
        {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 0},
        "max_completion_tokens",
    ),
}


@pytest.mark.parametrize("case", CHAT)
async def test_chat(client: Client, case: str) -> None:
    body, words = CHAT[case]
    status, answer = await client.post("/v1/chat/completions", body)
    assert status == 400
    assert words in answer["error"]["message"]
    assert client.engine.submitted == []


async def test_param_and_type_name_the_fault(client: Client) -> None:
    _, answer = await client.post("/v1/completions", {"prompt": [1] * 200})
    assert (answer["error"]["type"], answer["error"]["param"]) == ("context_length_exceeded", "prompt")
    _, answer = await client.post("/v1/completions", {"prompt": "a", "stop": [1]})
    assert (answer["error"]["type"], answer["error"]["param"]) == ("invalid_request_error", "stop")
    _, answer = await client.post("/v1/completions", {"prompt": "a", "model": "b"})
    assert (answer["error"]["type"], answer["error"]["param"]) == ("not_found_error", "model")


async def test_chunked_body_is_bounded_too(client: Client) -> None:
    async def chunks():
        for _ in range(80):
            yield b"a" * (64 << 10)

    async with client.session.post(client.url + "/v1/completions", data=chunks()) as response:
        assert response.status == 413
        assert "MiB" in (await response.json())["error"]["message"]


async def test_compressed_body(client: Client) -> None:
    status, answer = await client.post("/v1/completions", b"\x1f\x8b", **{"Content-Encoding": "gzip"})
    assert status == 400
    assert "Compressed" in answer["error"]["message"]


async def test_slow_body() -> None:
    async with fake_serving(body_timeout_s=0.01) as client:
        reader, writer = await client_socket(client)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        assert b" 408 " in await reader.readline()
        writer.close()


async def client_socket(client: Client):
    import asyncio

    host, port = client.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def test_unknown_path_and_method(client: Client) -> None:
    status, answer = await client.post("/v1/embeddings", {})
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
    assert "/v1/embeddings" in answer["error"]["message"]
    async with client.session.get(client.url + "/v1/completions") as response:
        assert response.status == 405
        assert "POST" in response.headers["Allow"]
        assert "POST" in (await response.json())["error"]["message"]


async def test_unforeseen_exception_tells_nothing(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    def fail(request: object) -> None:
        raise RuntimeError("the inner secret")

    client.engine.submit = fail
    status, answer = await client.post("/v1/completions", {"prompt": "a"})
    assert (status, answer["error"]["type"]) == (500, "internal_error")
    assert "secret" not in answer["error"]["message"]
    assert "the inner secret" in caplog.text


async def test_a_refusal_is_a_line_of_the_log_without_its_message(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="tollbridge")
    await client.post("/v1/completions", {"prompt": "a", "model": "my-private-name"})
    assert caplog.records[-1].fields == {
        "path": "/v1/completions",
        "status": 404,
        "type": "not_found_error",
        "param": "model",
    }


async def test_params_need_the_right_secret_and_time(client: Client) -> None:
    for kv, word in (
        (params("decode", secret=b"another"), "signature"),
        (params("decode", expires=1.0), "expired"),
    ):
        status, answer = await client.post("/v1/completions", {"prompt": "a", "kv_transfer_params": kv})
        assert status == 401
        assert word in answer["error"]["message"]
        assert answer["error"]["param"] == "kv_transfer_params"


async def test_without_a_secret_every_params_are_refused() -> None:
    async with fake_serving(secret=None) as client:
        for kv in (params("decode"), {"anything": 1}, {}):
            status, answer = await client.post("/v1/completions", {"prompt": "a", "kv_transfer_params": kv})
            assert status == 401
            assert "TOLLBRIDGE_SECRET" in answer["error"]["message"]


async def test_prefill_leg_generates_one_token(client: Client) -> None:
    body = {"prompt": "a", "max_tokens": 2, "kv_transfer_params": params("prefill")}
    status, answer = await client.post("/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("field", ["response_format", "text"])
async def test_no_depth_hurts(client: Client, field: str) -> None:
    """What can just be read may be too deep to be written again."""
    path = "/v1/responses" if field == "text" else "/v1/chat/completions"
    asked = b'"input": "a"' if field == "text" else b'"messages": [{"role": "user", "content": "a"}]'
    kind = b'"type": "json_schema", "name": "x", "schema": %b'
    wanted = (
        b'{"format": {%b}}' % kind
        if field == "text"
        else (b'{"type": "json_schema", "json_schema": {"name": "x", "schema": %b}}')
    )
    statuses = set()
    for depth in (*range(860, 1000), 100_000):
        schema = b'{"a":' * depth + b"1" + b"}" * depth
        status, answer = await client.post(path, b'{%b, "%b": %b}' % (asked, field.encode(), wanted % schema))
        assert status == 200 or "nested too deeply" in answer["error"]["message"]
        statuses.add(status)
    assert statuses == {200, 400}
