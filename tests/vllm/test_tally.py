"""What a worker counts for vLLM's statistics."""

from __future__ import annotations

import json

from tests.vllm.fakes import end
from tollbridge.vllm import tally


def test_nothing_happened() -> None:
    assert tally.Tally().take() is None
    assert tally.is_empty(tally.empty())
    assert tally.goodput_bytes_per_s(tally.empty()) == 0.0


def test_counts_and_starts_anew() -> None:
    counter = tally.Tally()
    loaded = end(1, "receive", num_tokens=9, payload_bytes=100, wire_bytes=110, wire_s=0.5)
    counter.received(loaded, recomputed_tokens=0)
    counter.received(end(2, "receive", "failed", "stalled", wire_bytes=5), recomputed_tokens=7)
    counter.sent(end(3, wire_bytes=50))
    data = counter.take()
    assert data is not None
    assert data["loaded_tokens"] == 9
    assert data["recomputed_tokens"] == 7
    assert data["received_bytes"] == 115
    assert data["sent_bytes"] == 50
    assert data["receive_outcomes"] == {"done": 1, "failed": 1}
    assert data["failures"] == {"receive:stalled": 1}
    assert tally.goodput_bytes_per_s(data) == 200.0
    assert json.loads(json.dumps(data)) == data
    assert counter.take() is None


def test_merge() -> None:
    first, second = tally.Tally(), tally.Tally()
    for counter in (first, second):
        counter.received(end(1, "receive", "failed", "checksum", wire_bytes=1), recomputed_tokens=3)
        counter.received(end(2, "receive", wire_s=1.0, payload_bytes=8), recomputed_tokens=0)
    total = first.take()
    other = second.take()
    assert total is not None
    assert other is not None
    tally.merge(total, other)
    assert total["failures"] == {"receive:checksum": 2}
    assert total["wire_s"] == [1.0, 1.0]
    assert total["recomputed_tokens"] == 6


def test_a_gauge_is_reported_once() -> None:
    counter = tally.Tally()
    counter.note("kv_bytes_per_token", 2048.0)
    data = counter.take()
    assert data is not None
    assert data["gauges"] == {"kv_bytes_per_token": 2048.0}
    assert counter.take() is None


def test_the_newest_gauge_counts() -> None:
    total, later = tally.empty(), tally.empty()
    total["gauges"] = {"pinned_blocks": 3, "waiting_prefill_tokens": 7}
    later["gauges"] = {"pinned_blocks": 0}
    assert not tally.is_empty(later)
    tally.merge(total, later)
    assert total["gauges"] == {"pinned_blocks": 0, "waiting_prefill_tokens": 7}
