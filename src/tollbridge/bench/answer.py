"""One streamed answer as it comes in: when tokens arrived, and what was wrong with it. Pure; times are arguments.

A failure is one of: `connection` (refused, reset), `http` (a status other than 200), `error` (an error event inside the
stream), `garbage` (no HTTP, no SSE or no JSON), `cut_short` (it ended without a finish reason), `empty` (no token at
all), `stalled` (nothing came for too long, or it had not ended when the run could wait no longer).

A chunk is one SSE event. Tokens that share a chunk have one arrival: the first makes a gap, the others are counted as
merged. How many a chunk carries is told by its `token_ids`, else by its running usage; failing both it is one.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tollbridge.wire import sse

WARM_TOKENS = 4  # a stream that has so many is past its start
_QUOTED = 200  # characters of what a server said that go into the record
_KEPT_BYTES = 4096


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()
    object: str | None = None  # "error" in older servers, with a message beside it
    message: str | None = None


_decode = msgspec.json.Decoder(_Event).decode


class Answer:
    """Fed by the connection; read when `done`."""

    def __init__(self, sent_s: float) -> None:
        self.sent_s = sent_s
        self.ttft_s: float | None = None
        self.gaps_s: list[float] = []
        self.num_tokens = 0
        self.num_merged = 0
        self.usage: _Usage | None = None
        self.headers: dict[str, str] = {}
        self.failure = ""
        self.detail = ""
        self.cut = False
        self.done = False
        self.on_done: Callable[[], None] = _nothing
        self.on_warm: Callable[[], None] = _nothing
        self._last_s = 0.0
        self._status = 0
        self._finished = False
        self._kept = bytearray()  # the start of the body, while nothing in it was an event
        self._heard_event = False
        self._parser = sse.Parser()

    # ── fed by the connection ──

    def head(self, status: int, headers: dict[str, str]) -> None:
        self._status, self.headers = status, headers

    @property
    def is_stream(self) -> bool:
        return self._status == 200 and "json" not in self.headers.get("content-type", "event-stream")

    def body(self, data: bytes, now_s: float) -> None:
        """Take a piece of the body that arrived at `now_s`."""
        if self.done:
            return
        if not self._heard_event:
            self._kept += data[: max(0, _KEPT_BYTES - len(self._kept))]
        if not self.is_stream:
            return
        try:
            for event in self._parser.feed(data):
                self._take(event, now_s)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            self.fail("garbage", f"{error}: {data[:60]!r}")

    def end(self) -> None:
        """The answer is complete, or the connection has closed."""
        if self.done:
            return
        if self._status == 0:
            self.fail("connection", "it was closed before an answer came")
        elif self._status != 200:
            self.fail("http", f"{self._status}: {_said(bytes(self._kept))}")
        elif not self.is_stream:
            self.fail("garbage", f"an answer that is no stream: {_said(bytes(self._kept))}")
        elif self._kept.strip() and not self._heard_event:
            self.fail("garbage", f"an answer without events: {_said(bytes(self._kept))}")
        elif self.ttft_s is None:
            self.fail("empty", "it ended without a token")
        elif not self._finished:
            self.fail("cut_short", f"it ended after {self.num_tokens} tokens without a finish reason")
        else:
            self._close()

    def fail(self, failure: str, detail: str) -> None:
        if not self.done:
            self.failure, self.detail = failure, "".join(c if c.isprintable() else " " for c in detail[:_QUOTED])
            self._close()

    def cut_off(self) -> None:
        """End it: what has come so far is good, and we want no more."""
        if not self.done:
            self.cut = True
            self._close()

    def _close(self) -> None:
        if self.usage is not None and self.ttft_s is not None:  # what no chunk has told, its sum does
            self.num_merged += max(0, self.usage.completion_tokens - self.num_tokens)
            self.num_tokens = max(self.num_tokens, self.usage.completion_tokens)
        self.done = True
        self.on_done()
        self.on_warm()  # whoever waits for its start waits no longer

    def _take(self, data: bytes, now_s: float) -> None:
        self._heard_event = True
        if self.done or data == b"[DONE]":
            return
        event = _decode(data)
        error = bytes(event.error)
        if error and error != b"null":
            self.fail("error", _said(b'{"error":' + error + b"}"))
            return
        if event.object == "error":
            self.fail("error", event.message or "without a message")
            return
        carried = self._carried(event)
        if event.usage is not None:
            self.usage = event.usage
        if carried:
            self._arrive(carried, now_s)
        if event.choices and event.choices[0].finish_reason is not None:
            self._finished = True

    def _carried(self, event: _Event) -> int:
        """Return how many tokens came with `event`."""
        if not event.choices:
            return 0
        choice = event.choices[0]
        if choice.token_ids is not None:
            return len(choice.token_ids)
        if event.usage is not None:
            return max(0, event.usage.completion_tokens - self.num_tokens)
        if choice.delta is not None:
            return int(bool(choice.delta.content))
        return int(choice.text is not None and (bool(choice.text) or choice.finish_reason is None))

    def _arrive(self, carried: int, now_s: float) -> None:
        if self.ttft_s is None:
            self.ttft_s = now_s - self.sent_s
        else:
            self.gaps_s.append(now_s - self._last_s)
        self._last_s = now_s
        before, self.num_tokens = self.num_tokens, self.num_tokens + carried
        self.num_merged += carried - 1
        if before < WARM_TOKENS <= self.num_tokens:
            self.on_warm()


def _nothing() -> None:
    """Nobody waits."""


def _said(body: bytes) -> str:
    """Return the message of an OpenAI-shaped error, or the start of whatever it is."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return body[:_QUOTED].decode(errors="replace")
