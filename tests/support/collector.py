"""A collector of OpenTelemetry traces: OTLP over HTTP with protobuf, as any real one takes it, in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Seen(NamedTuple):
    """One span as it arrived."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_s: float
    end_s: float
    attributes: dict[str, Any]
    is_error: bool


class Collector:
    """What has arrived at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Seen] = []
        self.raw = b""
        self._changed = threading.Condition()

    def take(self, body: bytes) -> None:
        told = ExportTraceServiceRequest.FromString(body)
        with self._changed:
            self.raw += body
            for group in told.resource_spans:
                service = _values(group.resource.attributes)["service.name"]
                self.spans += [_seen(service, span) for scope in group.scope_spans for span in scope.spans]
            self._changed.notify_all()

    def trace(self, trace_id: str, names: set[str], *, workers: int = 1, timeout_s: float = 60.0) -> list[Seen]:
        """Return the spans of a trace once every name has arrived, and from so many workers."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                found = [span for span in self.spans if span.trace_id == trace_id]
                if names <= {span.name for span in found} and [s.name for s in found].count("worker") >= workers:
                    return found
                left_s = deadline_s - time.monotonic()
                assert left_s > 0, f"only {sorted(span.name for span in found)} came of {sorted(names)}"
                self._changed.wait(left_s)


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            collector.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _seen(service: str, span: Any) -> Seen:
    return Seen(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_s=span.start_time_unix_nano / 1e9,
        end_s=span.end_time_unix_nano / 1e9,
        attributes=_values(span.attributes),
        is_error=span.status.code == 2,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
