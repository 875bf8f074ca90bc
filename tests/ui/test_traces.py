"""One trace for one request, across router, prefill worker, transfer and decode worker; and one line in each log."""

from __future__ import annotations

import time
from pathlib import Path

from tests.support.collector import Collector, Seen
from tests.support.stack import SECRET, Stack
from tests.ui.conftest import ask

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TRACE = PARENT[3:35]
WORKERS = 2  # whose spans come each by itself
ALL = {"request", "admission", "decide", "prefill", "decode", "worker", "queue", "transfer", "compute", "tokens"}
SENTENCE = "Nobody may find these words in any log"


def one(spans: list[Seen], name: str, parent: Seen | None = None) -> Seen:
    (found,) = [span for span in spans if span.name == name and (parent is None or span.parent_id == parent.span_id)]
    return found


def test_a_split_is_one_trace_across_all_processes(stack: Stack, collector: Collector) -> None:
    ask(stack, "split", [77] * 300, traceparent=PARENT, x_request_id="traced-split")
    spans = collector.trace(TRACE, ALL, workers=WORKERS)
    root = one(spans, "request")
    assert root.parent_id == PARENT[36:52]
    assert root.attributes["tollbridge.id"] == "traced-split"
    legs = {name: one(spans, name, root) for name in ("prefill", "decode")}
    workers = {name: one(spans, "worker", leg) for name, leg in legs.items()}
    assert {workers[name].attributes["tollbridge.role"] for name in workers} == {"prefill", "decode"}
    assert [workers[n].attributes["tollbridge.worker"] for n in ("prefill", "decode")] == ["p0", "d0"]
    assert {span.service for span in spans} == {"tollbridge-router", "tollbridge-worker"}
    transfer = one(spans, "transfer", workers["decode"])
    assert transfer.attributes["tollbridge.outcome"] == "done"
    assert transfer.attributes["tollbridge.medium"] == "tcp"
    assert transfer.attributes["tollbridge.payload_bytes"] == root.attributes["tollbridge.kv_payload_bytes"] > 0
    assert one(spans, "compute", workers["prefill"]).attributes["tollbridge.tokens"] == 300
    assert one(spans, "tokens", workers["decode"]).attributes["tollbridge.tokens"] == 8
    for span in spans:
        assert span.end_s >= span.start_s
        assert not span.is_error
    for leg, worker in workers.items():  # one machine, so one clock: each step lies within its parent
        assert legs[leg].start_s - 0.01 <= worker.start_s <= worker.end_s <= legs[leg].end_s + 10
        for span in spans:
            if span.parent_id == worker.span_id:
                assert worker.start_s - 0.001 <= span.start_s <= span.end_s <= worker.end_s + 0.001, span.name


def test_a_local_request_without_a_trace_begins_one(stack: Stack, collector: Collector) -> None:
    ask(stack, "local", [78] * 50, x_request_id="traced-local")
    root = next_root(collector, "traced-local")
    assert root.parent_id == ""
    spans = collector.trace(root.trace_id, {"request", "decode", "worker", "compute", "tokens"})
    assert one(spans, "worker", one(spans, "decode", root)).attributes["tollbridge.role"] == "local"
    assert not [span for span in spans if span.name == "transfer"]


def next_root(collector: Collector, request_id: str) -> Seen:
    with collector._changed:
        arrived = collector._changed.wait_for(lambda: roots(collector, request_id), timeout=60.0)
    assert arrived
    return roots(collector, request_id)[0]


def roots(collector: Collector, request_id: str) -> list[Seen]:
    return [
        span
        for span in collector.spans
        if span.attributes.get("tollbridge.id") == request_id and span.name == "request"
    ]


def test_logs_have_one_line_for_a_request_and_never_its_words(stack: Stack, collector: Collector) -> None:
    ask(stack, "split", SENTENCE, x_request_id="logged-1", authorization="Bearer sk-a-client-key")
    next_root(collector, "logged-1")
    logs = {name: written(process.log, "logged-1") for name, process in stack.processes.items()}
    for name, text in logs.items():
        lines = [line for line in text.splitlines() if "logged-1" in line]
        assert len(lines) == 1, (name, lines)
        assert " INFO " in lines[0]
        for secret in (SENTENCE, SENTENCE[:20], SECRET, "sk-a-client-key"):
            assert secret not in text, name
    assert "choice=split" in logs["router"]
    assert SENTENCE.encode() not in collector.raw
    assert SECRET.encode() not in collector.raw


def written(log: Path, words: str) -> str:
    """Return the log once it has those words: a process writes its line when its answer has left."""
    deadline_s = time.monotonic() + 60
    while words not in (text := log.read_text()):
        assert time.monotonic() < deadline_s, text[-1000:]
        time.sleep(0.01)
    return text
