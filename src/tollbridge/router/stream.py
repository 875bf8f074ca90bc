"""⑥ Back out: the decode worker's events to the client, unchanged but for the worker's report, which stays here.

Bytes pass at the granularity of whole events and are never parsed, except an event that holds one of the needles. A
needle is a JSON key with its quotes; inside generated text the closing quote is escaped, so text cannot imitate it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tollbridge.errors import UpstreamError
from tollbridge.wire import sse
from tollbridge.wire.params import WorkerReport

_PARAMS = b'"kv_transfer_params"'
_USAGE = b'"usage":'
_NULL_USAGE = b'"usage":null'
_ERROR = b'data: {"error"'

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """What the decision record keeps of an OpenAI usage object."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens the worker did not compute, from its cache or over the wire; None when it does not say."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class _Carrier(msgspec.Struct, frozen=True):
    usage: Usage | None = None


class _Shell(msgspec.Struct, frozen=True):
    choices: list[msgspec.Raw] | None = None
    usage: object = None  # not `Raw | None`: msgspec takes that for null alone
    error: object = None


class _Params(msgspec.Struct, frozen=True):
    tollbridge: WorkerReport | None = None


class EventFilter:
    """Turns the upstream's byte stream into what the client may see, whole events at a time. No I/O.

    `report` and `usage()` are what was learnt on the way; `finished` says that [DONE] came, `error` is the worker's own
    error event, which is held back. With `hide_usage` the router asked for the usage chunk, not the client, who does
    not get it. `passed` sees every event but errors, and returns what the client gets instead.
    """

    def __init__(
        self, max_event_bytes: int, *, hide_usage: bool = False, passed: Callable[[bytes], bytes] | None = None
    ) -> None:
        self._max_event_bytes = max_event_bytes
        self._passed = passed
        self._hide_usage = hide_usage
        self._rest = b""  # the start of an event whose end has not come
        self._usage_event = b""  # the last one: decoded once, at the end
        self.report: WorkerReport | None = None
        self.finished = False
        self.error = b""

    def feed(self, chunk: bytes) -> bytes:
        """Return the events completed by `chunk`, ready to relay; UpstreamError when one grows past the bound."""
        data = self._rest + chunk if self._rest else chunk
        end = end_of_last_event(data)
        self._rest = data[end:]
        if len(self._rest) > self._max_event_bytes:
            raise UpstreamError(f"The worker sent an event of more than {self._max_event_bytes} bytes.")
        whole = data[:end]
        if not whole:
            return b""
        if whole.rstrip().endswith(b"[DONE]"):
            self.finished = True
        if _PARAMS in whole or _ERROR in whole or (_USAGE in whole and not _only_null_usage(whole)):
            return b"".join([self._pass(self._inspect(raw)) for raw in _split(whole)])
        if self._passed is None:
            return whole
        return b"".join([self._passed(raw) for raw in _split(whole)])

    def usage(self) -> Usage | None:
        """Return the last usage object that passed."""
        if not self._usage_event:
            return None
        try:
            return msgspec.json.decode(sse.data(self._usage_event), type=_Carrier).usage
        except msgspec.DecodeError:
            return None

    def _pass(self, raw: bytes) -> bytes:
        return self._passed(raw) if raw and self._passed is not None else raw

    def _inspect(self, raw: bytes) -> bytes:
        if _USAGE in raw:
            self._usage_event = raw
        if _ERROR in raw:
            self.error = sse.data(raw)
            return b""
        if self._hide_usage and raw is self._usage_event and _is_usage_chunk(sse.data(raw)):
            return b""
        if _PARAMS not in raw:
            return raw
        stripped, report = take_report(sse.data(raw))
        self.report = report or self.report
        return b"" if _is_bare(stripped) else sse.event(stripped)


def take_report(body: bytes) -> tuple[bytes, WorkerReport | None]:
    """Return a JSON document less `kv_transfer_params`, and the worker's report that was in it.

    A document that is no JSON object passes as it is; a report that cannot be read counts as none.
    """
    if _PARAMS not in body:
        return body, None
    try:
        fields = _FIELDS.decode(body)
    except msgspec.DecodeError:
        return body, None
    params = fields.pop("kv_transfer_params", None)
    return msgspec.json.encode(fields), _report(params)


def usage_of(body: bytes) -> Usage | None:
    """Return the usage of a whole (non-streaming) answer."""
    try:
        return msgspec.json.decode(body, type=_Carrier).usage
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _report(params: msgspec.Raw | None) -> WorkerReport | None:
    if params is None or bytes(params) == b"null":
        return None
    try:
        return msgspec.json.decode(params, type=_Params).tollbridge
    except msgspec.DecodeError:
        return None


def end_of_last_event(data: bytes) -> int:
    """Return the index behind the last complete event, 0 when there is none."""
    lf, crlf = data.rfind(b"\n\n"), data.rfind(b"\r\n\r\n")
    return max(lf + 2 if lf >= 0 else 0, crlf + 4 if crlf >= 0 else 0)


def _split(whole: bytes) -> list[bytes]:
    """Cut complete events apart, each with its own blank line."""
    if b"\r" not in whole:
        if whole.find(b"\n\n") == len(whole) - 2:
            return [whole]
        return [each + b"\n\n" for each in whole[:-2].split(b"\n\n")]
    events = []
    while whole:
        ends = [at + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if (at := whole.find(mark)) >= 0]
        end = min(ends, default=len(whole))
        events.append(whole[:end])
        whole = whole[end:]
    return events


def _is_bare(data: bytes) -> bool:
    """A chunk that existed only to carry the report: clients that take `choices[0]` must not see it."""
    try:
        shell = msgspec.json.decode(data, type=_Shell)
    except msgspec.DecodeError:
        return False
    return not shell.choices and shell.error is None and shell.usage is None


def _is_usage_chunk(data: bytes) -> bool:
    """The chunk that `stream_options.include_usage` adds: usage and no choices."""
    try:
        shell = msgspec.json.decode(data, type=_Shell)
    except msgspec.DecodeError:
        return False
    return not shell.choices and shell.error is None and shell.usage is not None


def _only_null_usage(whole: bytes) -> bool:
    return whole.count(_USAGE) == whole.count(_NULL_USAGE)
