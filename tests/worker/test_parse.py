"""Any body is either a request or one sentence."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollbridge.errors import RequestError
from tollbridge.wire.openai import ChatCompletionRequest, CompletionRequest
from tollbridge.worker.parse import NEUTRAL, parse

KINDS = (CompletionRequest, ChatCompletionRequest)
NAMES = sorted({*CompletionRequest.__struct_fields__, *ChatCompletionRequest.__struct_fields__, *NEUTRAL, "x"})

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
bodies = st.dictionaries(st.sampled_from(NAMES), values, max_size=6)


def parse_or_refuse(body: bytes, kind: type[msgspec.Struct]) -> None:
    try:
        assert isinstance(parse(body, kind), kind)
    except RequestError as error:
        assert "\n" not in error.message
        assert error.message.endswith((".", "?"))


@given(bodies, st.sampled_from(KINDS))
def test_any_object(body: dict[str, object], kind: type[msgspec.Struct]) -> None:
    parse_or_refuse(json.dumps(body).encode(), kind)


@given(st.binary(max_size=64), st.sampled_from(KINDS))
def test_any_bytes(body: bytes, kind: type[msgspec.Struct]) -> None:
    parse_or_refuse(body, kind)


@given(bodies, st.integers(0, 200))
def test_any_cut(body: dict[str, object], cut: int) -> None:
    parse_or_refuse(json.dumps({"prompt": "a", **body}).encode()[:cut], CompletionRequest)


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_neutral_values_are_accepted_and_others_refused(name: str) -> None:
    kind, begin = CompletionRequest, b'{"prompt": "a", "'
    if name in CompletionRequest.__struct_fields__:
        kind, begin = ChatCompletionRequest, b'{"messages": [], "'
    for text in (b"null", *NEUTRAL[name]):
        parse(begin + name.encode() + b'": ' + text + b"}", kind)
    with pytest.raises(RequestError, match=name):
        parse(begin + name.encode() + b'": 12345}', kind)


def test_what_is_neutral_for_one_path_only_is_supported_on_the_other() -> None:
    for name in ("echo", "top_logprobs"):
        assert sum(name in kind.__struct_fields__ for kind in KINDS) == 1
    both = set(CompletionRequest.__struct_fields__) & set(ChatCompletionRequest.__struct_fields__)
    assert not both & set(NEUTRAL)
