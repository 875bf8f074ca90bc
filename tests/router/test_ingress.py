from __future__ import annotations

import msgspec
import pytest

from tollbridge.errors import RequestError
from tollbridge.router.decide import request_view
from tollbridge.router.ingress import Call, is_loopback, parse_body
from tollbridge.router.prompt import Prompt, maybe_ids


def call(body: bytes) -> Call:
    return Call(
        id="r", path="/v1/completions", body=parse_body(body), body_bytes=len(body), model=None, stream=False,
        override=None, trace={},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("::ffff:127.0.0.1", True), ("fe80::1%eth0", False),
        ("10.0.0.1", False), ("::ffff:10.0.0.1", False),
    ],
)  # fmt: skip
def test_loopback(host: str, own: bool) -> None:
    assert is_loopback(host) is own


def test_values_stay_the_clients_bytes() -> None:
    body = parse_body(b'{ "a": 1.50, "b": "\\u00e9", "kv_transfer_params": {}, "a": 2.50 }')
    assert msgspec.json.encode(body) == b'{"a":2.50,"b":"\\u00e9"}'


def test_smuggled_params() -> None:
    with pytest.raises(RequestError):
        parse_body(b'{"vllm_xargs": {"kv_transfer\\u005fparams": 1}}')
    with pytest.raises(RequestError):
        parse_body(b'{"vllm_xargs": {"a": 1e999, "kv_transfer_params": 1}}')
    with pytest.raises(RequestError, match=r"sampling_params\.extra_args"):  # of /inference/v1/generate
        parse_body(b'{"sampling_params": {"n": 1, "extra_args": {"kv_transfer_params": {"remote_host": "a"}}}}')
    for harmless in (b'{"other": 1}', b'{"a": 1e999}', b"null", b"[1]", b'"\xff"'):
        assert "vllm_xargs" in parse_body(b'{"vllm_xargs": %b}' % harmless)
        assert "sampling_params" in parse_body(b'{"sampling_params": {"extra_args": %b}}' % harmless)


@pytest.mark.parametrize(
    ("body", "unsplittable", "prompt_tokens", "max_tokens"),
    [
        (b'{"prompt": "a"}', None, None, None),
        (b'{"prompt": ["a"]}', None, None, None),
        (b'{"prompt": ["a", "b"]}', "prompt_list", None, None),
        (b'{"prompt": [1, 2, 3], "max_tokens": 7}', None, 3, 7),
        (b'{"prompt": [[1, 2, 3]]}', None, 3, None),
        (b'{"prompt": [ [1], [2] ]}', "prompt_list", None, None),
        (b'{"prompt": []}', None, 0, None),
        (b'{"prompt": "a", "n": 1, "best_of": 2}', "several_choices", None, None),
        (b'{"prompt": ["a", "b"], "n": 2}', "prompt_list", None, None),
        (b'{"prompt": "a", "echo": true, "logprobs": 1}', "prompt_logprobs", None, None),
        (b'{"prompt": "a", "echo": true, "logprobs": null, "prompt_logprobs": null}', None, None, None),
        (b'{"prompt": "a", "echo": false, "logprobs": 3}', None, None, None),
        (b'{"prompt": "a", "n": null}', None, None, None),
        (b'{"messages": [{"content": [{"type": "text"}, {"type" : "image_url"}]}]}', "multimodal", None, None),
        (b'{"messages": [{"content": [{"type": "input_audio"}]}]}', "multimodal", None, None),
        (b'{"messages": [{"content": "say \\"type\\": \\"image_url\\""}]}', None, None, None),
        (b'{"prompt": "a", "n": true, "max_tokens": "x"}', None, None, None),
        (b'{"prompt": "a", "n": 1e999, "max_tokens": %b}' % (b"9" * 5000), None, None, None),
        (b'{"prompt": "a", "n": "\xff", "best_of": 2.0, "max_tokens": -3}', None, None, -3),
        (b'{"messages": [{"role": "user"}], "max_completion_tokens": 5, "max_tokens": 6}', None, None, 5),
    ],
)
def test_request_view(body: bytes, unsplittable: str | None, prompt_tokens: int | None, max_tokens: int | None) -> None:
    ids = maybe_ids(call(body).body)
    prompt = Prompt(content=None, num_tokens=None if ids is None else len(ids), origin="ids")
    view = request_view(call(body), prompt, {})
    assert (view.unsplittable, view.prompt_tokens, view.max_tokens) == (unsplittable, prompt_tokens, max_tokens)
