"""Server-sent events, the framing of every OpenAI-compatible stream (WHATWG HTML, section 9.2). Pure functions.

`parse` is incremental: feed it bytes as they come, it yields the data of complete events and keeps the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """Frame one JSON document as an SSE event."""
    return b"data: " + data + b"\n\n"


def data(raw: bytes) -> bytes:
    """Return the data of one event."""
    if raw.startswith(b"data: ") and raw.find(b"\n") == len(raw) - 2:  # one line, as nearly always
        return raw[6:-2]
    return b"\n".join(line[5:].removeprefix(b" ") for line in raw.splitlines() if line.startswith(b"data:"))


class Parser:
    """Splits a byte stream into SSE data payloads. A single event is bounded by `max_event_bytes`."""

    def __init__(self, max_event_bytes: int = 8 << 20) -> None:
        self._buffer = bytearray()
        self._max_event_bytes = max_event_bytes

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the data of each event completed by `chunk`; ValueError when one grows past the bound."""
        self._buffer += chunk
        while True:
            end, skip = self._boundary()
            if end < 0:
                break
            raw = bytes(self._buffer[:end])
            del self._buffer[: end + skip]
            found = data(raw)
            if found:
                yield found
        if len(self._buffer) > self._max_event_bytes:
            raise ValueError(f"an event of more than {self._max_event_bytes} bytes")

    def _boundary(self) -> tuple[int, int]:
        lf, crlf = self._buffer.find(b"\n\n"), self._buffer.find(b"\r\n\r\n")
        if crlf >= 0 and (lf < 0 or crlf < lf):
            return crlf, 4
        return lf, 2
