"""The event filter: nothing internal gets out, nothing else changes, whatever the pieces look like."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollbridge.errors import UpstreamError
from tollbridge.router.stream import EventFilter, take_report, usage_of
from tollbridge.wire import sse

REPORT = {"tollbridge": {"role": "decode", "prompt_tokens": 9, "loaded_tokens": 8}}
USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def chunk(text: str, **more: object) -> bytes:
    return event({"choices": [{"index": 0, "text": text}], **more})


PLAIN = [chunk("a"), chunk('"kv_transfer_params": {}'), chunk('data: [DONE]\n\n"usage":{'), b": a comment\n\n"]
TAIL = [chunk("z", kv_transfer_params=REPORT), event({"choices": [], "usage": USAGE}), b"data: [DONE]\n\n"]


def filtered(pieces: list[bytes]) -> tuple[EventFilter, bytes]:
    events = EventFilter(1 << 20)
    return events, b"".join(events.feed(piece) for piece in pieces)


@given(st.lists(st.integers(1, 40), max_size=60), st.booleans())
def test_any_cut_gives_the_same_result(cuts: list[int], crlf: bool) -> None:
    stream = b"".join(PLAIN + TAIL)
    if crlf:
        stream = stream.replace(b"\n\n", b"\r\n\r\n")
    pieces, rest = [], stream
    for size in cuts:
        pieces.append(rest[:size])
        rest = rest[size:]
    events, out = filtered([*pieces, rest])
    assert b"".join(PLAIN) == out.replace(b"\r\n", b"\n")[: len(b"".join(PLAIN))]
    assert b'"tollbridge"' not in out
    assert events.report is not None
    assert events.report.loaded_tokens == 8
    usage = events.usage()
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (9, 2)
    assert events.finished


def test_events_pass_unchanged_as_soon_as_they_are_whole() -> None:
    events = EventFilter(1 << 20)
    first = chunk("a")
    assert events.feed(first[:-1]) == b""
    assert events.feed(first[-1:] + b"data: {") == first
    assert not events.finished


def test_several_tokens_in_one_piece() -> None:
    pieces = PLAIN * 3
    assert filtered([b"".join(pieces)])[1] == b"".join(pieces)


def test_only_the_report_is_taken_from_its_chunk() -> None:
    _, out = filtered([chunk("end", kv_transfer_params=REPORT, usage=USAGE)])
    assert json.loads(out.removeprefix(b"data: ")) == {"choices": [{"index": 0, "text": "end"}], "usage": USAGE}


def test_a_chunk_that_carries_only_the_report_is_dropped() -> None:
    events, out = filtered([event({"choices": [], "kv_transfer_params": REPORT})])
    assert out == b""
    assert events.report is not None


@pytest.mark.parametrize("params", [None, {}, {"tollbridge": {"role": 3}}, {"remote_block_ids": [1]}, "text", [1]])
def test_params_that_are_no_report_of_ours_are_stripped_too(params: object) -> None:
    events, out = filtered([chunk("a", kv_transfer_params=params)])
    assert b"kv_transfer_params" not in out
    assert events.report is None


def test_null_usage_needs_no_parsing() -> None:
    first = b'data: {"choices":[{"text":"a"}],"usage":null}\n\n'
    events, out = filtered([first])
    assert (out, events.usage()) == (first, None)


def test_error_events_are_held_back() -> None:
    error = event({"error": {"message": "no", "code": 500}})
    events, out = filtered([chunk("a") + error])
    assert (out, json.loads(events.error)["error"]["code"]) == (chunk("a"), 500)


@pytest.mark.parametrize("data", [b'data: {broken "kv_transfer_params"\n\n', b'data: {"usage":{"x"\n\n'])
def test_broken_json_passes(data: bytes) -> None:
    events, out = filtered([data])
    assert out == data
    assert events.report is None
    assert events.usage() is None


def test_an_event_without_end_is_bounded() -> None:
    events = EventFilter(1000)
    with pytest.raises(UpstreamError, match="more than 1000 bytes"):
        for _ in range(3):
            events.feed(b"x" * 500)


def test_whole_answers() -> None:
    body, report = take_report(json.dumps({"a": 1.50, "kv_transfer_params": REPORT}).encode())
    assert json.loads(body) == {"a": 1.5}
    assert report is not None
    assert take_report(b"not json") == (b"not json", None)
    assert take_report(b'["kv_transfer_params"]') == (b'["kv_transfer_params"]', None)
    assert usage_of(b'{"usage": {"prompt_tokens": 3}}').prompt_tokens == 3  # type: ignore[union-attr]
    assert usage_of(b"not json") is None


@pytest.mark.parametrize(
    ("raw", "data"),
    [
        (b"data: {}\n\n", b"{}"),
        (b"data:{}\n\n", b"{}"),
        (b"data: {}\r\n\r\n", b"{}"),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b": comment\ndata: a\n\n", b"a"),
        (b"data: a\nid: 1\n\n", b"a"),
        (b"event: x\n\n", b""),
    ],
)
def test_the_data_of_an_event(raw: bytes, data: bytes) -> None:
    assert sse.data(raw) == data
    seen: list[bytes] = []
    EventFilter(1 << 20, passed=lambda one: seen.append(one) or b"").feed(raw + raw)
    assert seen == [raw, raw]
