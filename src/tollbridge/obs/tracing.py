"""Traces of requests across router and workers, by OpenTelemetry where it is installed and asked for.

Which implementation is used is chosen once, at start. Without one nothing is recorded, and the client's `traceparent`
goes to the workers as it came; with one the workers get the span of their own leg and hang theirs below it: the
embedded worker tells the past of a request when it has ended, a vLLM traces itself. Attributes never hold prompts,
outputs or keys.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import tollbridge
from tollbridge.errors import StartupError

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
HEADERS = ("traceparent", "tracestate")
Value = str | int | float | bool
_HARMLESS = re.compile(r"[\x20-\x7e]{1,512}")


def trace_of(headers: Mapping[str, str]) -> dict[str, str]:
    """Return what the headers of a request say of the trace that it is part of."""
    given = {name: headers.get(name, "") for name in HEADERS}
    return {name: value for name, value in given.items() if _HARMLESS.fullmatch(value)}


class Past(NamedTuple):
    """One step of a request that has ended. Times are Unix seconds."""

    name: str
    start: float
    end: float
    attributes: Mapping[str, Value | None] = {}
    error: str = ""


class Span(Protocol):
    """One step of a request."""

    @property
    def headers(self) -> Mapping[str, str]:
        """What a worker is told of the trace."""
        ...

    def set(self, **attributes: Value | None) -> None: ...


class Trace(Protocol):
    """All spans of one request. `end` it once."""

    def span(self, name: str, **attributes: Value | None) -> AbstractContextManager[Span]: ...

    def event(self, name: str) -> None: ...

    def end(self, *, error: str = "", **attributes: Value | None) -> None: ...


class Tracer(Protocol):
    def begin(self, headers: Mapping[str, str]) -> Trace:
        """Start the trace of a request that came with `headers`."""
        ...

    def tell(self, headers: Mapping[str, str], whole: Past, steps: Sequence[Past]) -> None:
        """Record a request that came with `headers` and has ended, and its steps."""
        ...

    def close(self) -> None:
        """Send what has not been sent yet; may block for some seconds."""
        ...


class NoTrace:
    """Implements `Trace` and `Span`: records nothing, passes the client's headers on."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = headers

    @contextmanager
    def span(self, name: str, **attributes: Value | None) -> Iterator[NoTrace]:
        yield self

    def set(self, **attributes: Value | None) -> None:
        return

    def event(self, name: str) -> None:
        return

    def end(self, *, error: str = "", **attributes: Value | None) -> None:
        return


class NoTracer:
    """Implements `Tracer`."""

    def begin(self, headers: Mapping[str, str]) -> NoTrace:
        return NoTrace(headers)

    def tell(self, headers: Mapping[str, str], whole: Past, steps: Sequence[Past]) -> None:
        return

    def close(self) -> None:
        return


class OtelTracer:
    """Implements `Tracer` over an OpenTelemetry SDK provider, which it owns."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tollbridge", tollbridge.__version__)

    def begin(self, headers: Mapping[str, str]) -> _OtelTrace:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(headers)
        return _OtelTrace(self._tracer, self._tracer.start_span("request", context=parent, kind=SpanKind.SERVER))

    def tell(self, headers: Mapping[str, str], whole: Past, steps: Sequence[Past]) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        root = self._past(whole, TraceContextTextMapPropagator().extract(headers), SpanKind.SERVER)
        below = set_span_in_context(root)
        for step in steps:
            self._past(step, below, SpanKind.INTERNAL)

    def _past(self, past: Past, context: Any, kind: Any) -> Any:
        span = self._tracer.start_span(past.name, context=context, kind=kind, start_time=int(past.start * 1e9))
        _set(span, past.attributes)
        if past.error:
            _fail(span, past.error)
        span.end(end_time=int(max(past.end, past.start) * 1e9))
        return span

    def close(self) -> None:
        self._provider.shutdown()


class _OtelTrace:
    def __init__(self, tracer: Any, root: Any) -> None:
        self._tracer, self._root = tracer, root

    @contextmanager
    def span(self, name: str, **attributes: Value | None) -> Iterator[_OtelSpan]:
        from opentelemetry.trace import SpanKind, set_span_in_context

        kind = SpanKind.CLIENT if name in ("prefill", "decode") else SpanKind.INTERNAL
        span = self._tracer.start_span(name, context=set_span_in_context(self._root), kind=kind)
        try:
            _set(span, attributes)
            yield _OtelSpan(span)
        except BaseException as error:  # a cancelled step is one that did not succeed
            _fail(span, str(error) or type(error).__name__)
            raise
        finally:
            span.end()

    def event(self, name: str) -> None:
        self._root.add_event(name)

    def end(self, *, error: str = "", **attributes: Value | None) -> None:
        _set(self._root, attributes)
        if error:
            _fail(self._root, error)
        self._root.end()


class _OtelSpan:
    def __init__(self, span: Any) -> None:
        self._span = span

    @property
    def headers(self) -> Mapping[str, str]:
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, context=set_span_in_context(self._span))
        return carrier

    def set(self, **attributes: Value | None) -> None:
        _set(self._span, attributes)


def make_tracer(environment: Mapping[str, str] | None = None, *, service: str = "tollbridge-router") -> Tracer:
    """Return a tracer that sends to the endpoint of OpenTelemetry's own variables, one that does nothing without them.

    `service` is who we are; OTEL_SERVICE_NAME may say otherwise. StartupError when they are set and the packages are
    missing.
    """
    given = os.environ if environment is None else environment
    if not any(given.get(name) for name in ENDPOINTS):
        return NoTracer()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise StartupError(
            f"{ENDPOINTS[1]} is set, but OpenTelemetry is not installed: pip install 'tollbridge[otel]'."
        ) from None
    name = given.get("OTEL_SERVICE_NAME") or service
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return OtelTracer(provider)


def _set(span: Any, attributes: Mapping[str, Value | None]) -> None:
    for name, value in attributes.items():
        if value is not None:
            span.set_attribute(f"tollbridge.{name}", value)


def _fail(span: Any, what: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, what[:300]))
