"""The spans of real requests through the router, by the SDK's own exporter."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.support.router_rig import rig
from tests.support.stub_worker import Behaviour
from tollbridge.errors import StartupError
from tollbridge.obs.tracing import NoTracer, OtelTracer, make_tracer

STREAM = {"prompt": "Hello", "max_tokens": 8, "stream": True, "temperature": 0}
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def exporting() -> tuple[OtelTracer, InMemorySpanExporter]:
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return OtelTracer(provider), exporter


async def test_a_split_is_one_trace_across_both_legs() -> None:
    tracer, exporter = exporting()
    async with rig(tracer=tracer) as r:
        await r.post(STREAM, policy="split", traceparent=PARENT, x_request_id="traced")
        spans = {span.name: span for span in exporter.get_finished_spans()}
        assert set(spans) == {"request", "admission", "decide", "prefill", "decode"}
        assert {format(span.context.trace_id, "032x") for span in spans.values()} == {PARENT[3:35]}
        root = spans["request"]
        assert format(root.parent.span_id, "016x") == PARENT[36:52]
        assert all(span.parent.span_id == root.context.span_id for name, span in spans.items() if name != "request")
        told = dict(root.attributes)
        assert (told["tollbridge.id"], told["tollbridge.choice"], told["tollbridge.reason"]) == (
            "traced", "split", "forced",
        )  # fmt: skip
        assert (told["tollbridge.prefill"], told["tollbridge.decode"]) == ("p0", "d0")
        assert told["tollbridge.kv_payload_bytes"] == 99 * 64
        assert [event.name for event in root.events] == ["first_byte"]
        # each worker sees its own leg as parent
        for name, worker in (("prefill", "p0"), ("decode", "d0")):
            seen = r[worker].seen[-1].headers["traceparent"]
            assert seen == f"00-{PARENT[3:35]}-{spans[name].context.span_id:016x}-01"
            assert spans[name].attributes["tollbridge.worker"] == worker


async def test_failed_steps_and_refused_requests_are_errors() -> None:
    tracer, exporter = exporting()
    async with rig(tracer=tracer) as r:
        for name in ("d0", "p0"):
            r[name].behaviour["local"] = Behaviour("error", status=500)
        await r.post(STREAM)
        spans = exporter.get_finished_spans()
        assert [span.status.is_ok for span in spans if span.name in ("decode", "request")] == [False] * 3
        exporter.clear()
        await r.post(b"no json")
        assert {span.name: span.status.is_ok for span in exporter.get_finished_spans()} == {
            "admission": False, "request": False,
        }  # fmt: skip


async def test_without_a_tracer_the_clients_own_trace_goes_on() -> None:
    async with rig() as r:
        await r.post(STREAM, traceparent=PARENT)
        assert [seen.headers["traceparent"] for w in r.workers.values() for seen in w.seen] == [PARENT]


def test_it_is_chosen_by_opentelemetrys_own_variables() -> None:
    assert isinstance(make_tracer({}), NoTracer)
    tracer = make_tracer({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"})
    assert isinstance(tracer, OtelTracer)
    tracer.close()


def test_asked_for_and_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(StartupError, match=r"tollbridge\[otel\]"):
        make_tracer({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"})


def test_nothing_is_imported_that_nobody_asked_for() -> None:
    code = "import sys, tollbridge.router.main; print(any(name.startswith('opentelemetry') for name in sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
