"""Answers cut anywhere, of every framing, one after the other; and bytes that are no HTTP at all."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tollbridge.router.http1 import MAX_DRY_BYTES, AnswerParser, MalformedError, Origin, request_head

FRAMINGS = ("chunked", "length", "close")
INTERIM = b"HTTP/1.1 100 Continue\r\nX-Tag: early\r\n\r\n"


@dataclass(frozen=True)
class Said:
    """One answer as a worker may write it."""

    framing: str
    status: int
    pieces: tuple[bytes, ...]
    interim: bool = False
    trailer: bool = False
    closes: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    def raw(self) -> bytes:
        head = b"HTTP/1.1 %d Fine\r\nContent-Type: Text/Event-Stream; charset=utf-8\r\n" % self.status
        head += b"Connection: close\r\n" if self.closes else b""
        if self.framing == "chunked":
            chunks = b"".join(b"%x;odd=1\r\n%b\r\n" % (len(piece), piece) for piece in self.pieces if piece)
            end = b"0\r\nX-Late: yes\r\n\r\n" if self.trailer else b"0\r\n\r\n"
            head, rest = head + b"Transfer-Encoding: chunked\r\n\r\n", chunks + end
        elif self.framing == "length":
            head, rest = head + b"Content-Length: %d\r\n\r\n" % len(self.body), self.body
        else:
            head, rest = head + b"\r\n", self.body
        return (INTERIM if self.interim else b"") + head + rest


def said(framings: tuple[str, ...]) -> st.SearchStrategy[Said]:
    return st.builds(
        Said,
        framing=st.sampled_from(framings),
        status=st.sampled_from([200, 206, 404, 500]),
        pieces=st.lists(st.binary(max_size=40), max_size=4).map(tuple),
        interim=st.booleans(),
        trailer=st.booleans(),
    )


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({point % (len(data) + 1) for point in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(at)]


def heard(parser: AnswerParser, pieces: list[bytes]) -> bytes:
    body = b""
    for piece in pieces:
        assert not parser.is_complete, "complete before its last byte"
        body += parser.feed(piece)
        parser.check()
    return body


@given(st.lists(said(FRAMINGS[:2]), min_size=1, max_size=3), st.lists(st.integers(0, 500), max_size=8))
def test_answers_of_one_connection_cut_anywhere(answers: list[Said], cuts: list[int]) -> None:
    parser = AnswerParser()
    for answer in answers:
        parser.reset()
        assert heard(parser, cut(answer.raw(), cuts)) == answer.body
        assert (parser.status, parser.content_type) == (answer.status, "text/event-stream")
        assert parser.is_complete and parser.keeps_alive and not parser.surplus
        assert b"x-tag" not in parser.headers and b"x-late" not in parser.headers


@given(said(("close",)), st.lists(st.integers(0, 500), max_size=8))
def test_the_end_of_the_connection_may_end_an_answer(answer: Said, cuts: list[int]) -> None:
    parser = AnswerParser()
    assert heard(parser, cut(answer.raw(), cuts)) == answer.body
    assert not parser.is_complete
    parser.end()
    assert parser.is_complete and not parser.keeps_alive


@given(said(FRAMINGS[:2]), st.data())
def test_a_framed_answer_that_is_cut_off_is_no_answer(answer: Said, data: st.DataObject) -> None:
    raw = answer.raw()
    end = data.draw(st.integers(0, len(raw) - 1))
    parser = AnswerParser()
    parser.feed(raw[:end])
    with pytest.raises(MalformedError, match="closed"):
        parser.end()


@given(said(FRAMINGS[:2]), st.binary(min_size=1, max_size=40), st.booleans())
def test_bytes_behind_an_answer_spoil_the_connection(answer: Said, more: bytes, together: bool) -> None:
    parser = AnswerParser()
    pieces = [answer.raw() + more] if together else [answer.raw(), more]
    body = b""
    try:
        for piece in pieces:
            body += parser.feed(piece)
    except MalformedError:
        return
    assert body == answer.body
    assert parser.surplus or more.strip(b"\r\n") == b"", "line breaks between messages are allowed for"


@given(st.lists(st.binary(max_size=60), max_size=6))
def test_anything_is_an_answer_or_malformed(pieces: list[bytes]) -> None:
    parser = AnswerParser()
    try:
        for piece in [b"HTTP/1.1 200 OK\r\n", *pieces]:
            parser.feed(piece)
            parser.check()
        parser.end()
    except MalformedError as error:
        assert str(error)
    parser.check()


def test_a_worker_that_asks_to_close() -> None:
    parser = AnswerParser()
    parser.feed(Said("length", 200, (b"x",), closes=True).raw())
    assert parser.is_complete and not parser.keeps_alive


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
    ],
)
def test_what_must_not_be_taken_for_an_answer(raw: bytes) -> None:
    with pytest.raises(MalformedError):
        AnswerParser().feed(raw)


@pytest.mark.parametrize(
    "start",
    [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"],
    ids=["head", "trailer"],
)
def test_heads_and_trailers_are_bounded(start: bytes) -> None:
    parser = AnswerParser()
    parser.feed(start)
    line = b"X-Filler: " + b"x" * 500 + b"\r\n"
    with pytest.raises(MalformedError, match="head or trailer"):
        for _ in range(2 * MAX_DRY_BYTES // len(line)):
            parser.feed(line)


def test_a_long_stream_of_chunks_is_not() -> None:
    parser = AnswerParser()
    parser.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert sum(len(parser.feed(b"3\r\nabc\r\n")) for _ in range(20_000)) == 60_000
    parser.check()


def test_request_heads() -> None:
    origin = Origin.of("http://us%40er:pa%3Ass@worker:8101/prefix")
    head = request_head(origin, "POST", "/v1/completions", {"x-request-id": "r"}, 12).decode()
    assert (origin.host, origin.port, origin.tls) == ("worker", 8101, False)
    assert head.startswith("POST /prefix/v1/completions HTTP/1.1\r\nHost: worker:8101\r\n")
    assert "\r\nAuthorization: Basic dXNAZXI6cGE6c3M=\r\n" in head
    assert "\r\nAccept-Encoding: identity\r\n" in head
    assert head.endswith("\r\nx-request-id: r\r\nContent-Length: 12\r\n\r\n")
    assert Origin.of("https://[::1]").port == 443


@pytest.mark.parametrize("value", ["a\nb: c", "a\r\nb: c", "a\rb"])
def test_a_header_cannot_begin_another(value: str) -> None:
    with pytest.raises(ValueError, match="line break"):
        request_head(Origin.of("http://w:1"), "GET", "/", {"x": value}, None)
