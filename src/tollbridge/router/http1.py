"""HTTP/1.1 towards the workers, without I/O: the head of a request, and answers read from bytes cut anywhere.

The grammar is llhttp's, in its strict mode (RFC 9112). What this adds is when an answer ends, also one that only the
end of the connection ends, whether the connection may carry another, and a bound on whatever is not body.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

import httptools

MAX_DRY_BYTES = 64 << 10  # heads, trailers and chunk extensions: what a worker may send without any body

_FIRST_FINAL = 200  # below it are interim answers (RFC 9110, section 15.2)


class MalformedError(Exception):
    """The bytes are no HTTP/1.1 answer that a router can pass on, or they end too early."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where requests to one worker go."""

    host: str
    port: int
    tls: bool
    prefix: str  # of every path
    fixed: str  # header lines of every request

    @classmethod
    def of(cls, url: str) -> Origin:
        """Return the origin of `url`, whose credentials, if it has any, go with every request."""
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        host = parts.netloc.rpartition("@")[2]
        fixed = f"Host: {host}\r\nAccept-Encoding: identity\r\n"
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            fixed += f"Authorization: Basic {b64encode(pair.encode()).decode()}\r\n"
        return cls(
            host=parts.hostname or "", port=parts.port or (443 if tls else 80), tls=tls, prefix=parts.path, fixed=fixed
        )


def request_head(origin: Origin, method: str, path: str, headers: Mapping[str, str], num_bytes: int | None) -> bytes:
    """Return the head of a request with a body of `num_bytes`; ValueError when a header would begin a new line."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        raise ValueError("a header of a request to a worker has a line break in it")
    length = "" if num_bytes is None else f"Content-Length: {num_bytes}\r\n"
    return f"{method} {origin.prefix}{path} HTTP/1.1\r\n{origin.fixed}{lines}{length}\r\n".encode("latin-1")


class AnswerParser:
    """Reads the answers of one connection, one after the other: `reset` before each request.

    `status` is 0 until the head is there; `is_complete` says that the answer has ended.
    """

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(_Callbacks(self))
        self._pieces: list[bytes] = []
        self._dry_bytes = 0
        self.surplus = False  # bytes came that nobody had asked for
        self.reset()

    def reset(self) -> None:
        """Expect the next answer."""
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.is_complete = False
        self.keeps_alive = False

    @property
    def content_type(self) -> str:
        """The media type without its parameters, in lower case."""
        return self.headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")

    def feed(self, data: bytes) -> bytes:
        """Return the part of the body that is in `data`; MalformedError when it is no HTTP."""
        if self.is_complete:
            self.surplus = True
            return b""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise MalformedError(str(error) or type(error).__name__) from None
        pieces = self._pieces
        if not pieces:
            self._bound(len(data))
            return b""
        self._pieces, self._dry_bytes = [], 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def end(self) -> None:
        """The connection has ended; MalformedError when that cuts an answer off."""
        framed = b"content-length" in self.headers or b"transfer-encoding" in self.headers
        if self.is_complete or (self.status and not framed):
            self.is_complete, self.keeps_alive = True, False
            return
        raise MalformedError("the connection was closed" if self.status else "the connection was closed unanswered")

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert self._dry_bytes <= MAX_DRY_BYTES
        assert not self._pieces
        assert self.status or not self.is_complete

    # --- what the grammar found

    def _bound(self, num_bytes: int) -> None:
        self._dry_bytes = 0 if self.is_complete else self._dry_bytes + num_bytes
        if self._dry_bytes > MAX_DRY_BYTES:
            raise MalformedError(f"more than {MAX_DRY_BYTES} bytes of head or trailer")

    def _began(self) -> None:
        if self.is_complete:
            self.surplus = True

    def _header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # trailers carry nothing that we want
            self.headers[name.lower()] = value

    def _head(self) -> None:
        if self.is_complete:
            return
        status = self._parser.get_status_code()
        if status < _FIRST_FINAL:
            self.headers.clear()
            return
        self.status = status
        self.keeps_alive = self._parser.should_keep_alive()

    def _body(self, piece: bytes) -> None:
        if not self.is_complete:
            self._pieces.append(piece)

    def _ended(self) -> None:
        self.is_complete = bool(self.status)


class _Callbacks:
    """The names by which httptools calls."""

    def __init__(self, parser: AnswerParser) -> None:
        self.on_message_begin = parser._began
        self.on_header = parser._header
        self.on_headers_complete = parser._head
        self.on_body = parser._body
        self.on_message_complete = parser._ended
