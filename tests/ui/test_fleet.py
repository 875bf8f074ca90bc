"""Workers and links -> rows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ui.records import NOW, local, split
from tollbridge.clock import SystemClock
from tollbridge.config.cluster import WorkerConfig
from tollbridge.router.fleet import Fleet
from tollbridge.ui.fleet import MAX_LINKS, link_rows, worker_row
from tollbridge.ui.snapshot import WorkerRow


def row(name: str, prefer: str = "prefill", **more: Any) -> WorkerRow:
    known = {"engine": "embedded", "host": f"h-{name}", "ready": True, "can_send": True}
    return WorkerRow(name=name, prefer=prefer, **{**known, **more})


P, D = row("p0"), row("d0", "decode")


def test_a_link_and_what_is_on_it() -> None:
    """Two transfers of 5,000 bytes in ten seconds, over a link of 2,000 bytes a second."""
    records = [split(1), local(2), split(9), split(11)]
    (link,) = link_rows([P, D], {("p0", "d0"): 3}, {"h-p0>h-d0": 2000.0}, records, NOW)
    assert (link.prefill, link.decode, link.num_transfers) == ("p0", "d0", 3)
    assert link.recent_bytes_per_s == pytest.approx(1000.0)
    assert link.use == pytest.approx(0.5)


def test_a_link_that_nobody_has_measured() -> None:
    (link,) = link_rows([P, D], {}, {}, [], NOW)
    assert (link.goodput_bytes_per_s, link.use) == (None, None)


def test_only_who_can_share_a_split_has_a_link() -> None:
    assert link_rows([P, row("d0", "decode", ready=False)], {}, {}, [], NOW) == []
    assert link_rows([row("p0", can_send=False), D], {}, {}, [], NOW) == []
    both = [row("a", "any"), row("b", "any")]
    assert {(link.prefill, link.decode) for link in link_rows(both, {}, {}, [], NOW)} == {("a", "b"), ("b", "a")}


def test_a_large_fleet_shows_its_busiest_links() -> None:
    fleet = [row(f"p{n}") for n in range(200)] + [row(f"d{n}", "decode") for n in range(800)]
    links = link_rows(fleet, {("p150", "d700"): 2}, {}, [], NOW)
    assert len(links) == MAX_LINKS
    assert (links[0].prefill, links[0].decode) == ("p150", "d700")


STATUS: dict[str, Any] = {
    "engine": {"max_pinned_blocks": 10, "prefix_cache_queries_total": 100, "prefix_cache_hits_total": 40, "steps": "x"},
    "transfer": {
        "send": {"active": 1, "done": 5, "failures_by_reason": {"checksum": 2}, "payload_bytes_by_medium": {"tcp": 7}}
    },
    "rss_bytes": 5,
}


@pytest.mark.parametrize(("status", "hits"), [(STATUS, 40), ({}, 0), ({"engine": "odd"}, 0), ({"engine": None}, 0)])
def test_a_worker_says_what_it_wants(status: dict[str, Any], hits: int) -> None:
    """Whatever a server answers at /tollbridge/status: what is not understood counts as not said."""
    fleet = Fleet([WorkerConfig(name="w", url="http://127.0.0.1:1")], clock=SystemClock())
    worker = fleet["w"]
    worker.status = status
    told = worker_row(worker, fleet.view_of(worker))
    assert told.cache_hit_tokens == hits
    if hits:
        assert (told.send.failed, told.send.payload_bytes, told.max_pinned_tokens) == (2, 7, 160)
