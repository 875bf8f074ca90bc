"""The dashboard inside a running router: who may see what, that the figures are those of /metrics, and how it ends."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec
import pytest

from tests.support.router_rig import PATIENCE_S, QUICK, Rig, rig
from tests.support.stub_worker import Behaviour
from tollbridge.ui import mount as module
from tollbridge.ui.hub import Hub
from tollbridge.ui.mount import mount
from tollbridge.ui.snapshot import History, Snapshot

STREAM = {"prompt": "Nobody may read this sentence", "max_tokens": 8, "stream": True, "temperature": 0}
PAGE = [mount]


async def snapshot(r: Rig) -> Snapshot:
    return msgspec.json.decode((await r.get("/ui/snapshot")).body, type=Snapshot)


async def frames(response: aiohttp.ClientResponse, number: int) -> list[tuple[str, bytes]]:
    """Return the next events as (name, data)."""
    found = []
    async with asyncio.timeout(PATIENCE_S):
        while len(found) < number:
            name = (await response.content.readline()).decode().removeprefix("event: ").strip()
            found.append((name, (await response.content.readline()).removeprefix(b"data: ")))
            await response.content.readline()
    return found


async def test_figures_are_those_of_the_metrics() -> None:
    async with rig(extensions=PAGE) as r:
        for policy in ("split", "split", "local"):
            await r.post(STREAM, policy=policy)
        r["d0"].behaviour["local"] = Behaviour("error", status=400)
        await r.post(STREAM, policy="local")
        totals = (await snapshot(r)).totals
        assert (totals.requests, totals.split, totals.local) == (4, 2, 2)
        for value, name, labels in (
            (totals.requests, "requests_total", {}),
            (totals.split, "requests_total", {"choice": "split"}),
            (totals.errors, "requests_total", {"outcome": "error"}),
            (totals.in_slo, "slo_requests_total", {}),
            (totals.verified, "split_verified_total", {}),
            (totals.kv_bytes, "kv_payload_bytes_total", {}),
            (totals.wire_s, "kv_wire_seconds_total", {}),
            (totals.toll_s, "toll_seconds_total", {}),
            (totals.cacheable_tokens, "cacheable_prompt_tokens_total", {}),
        ):
            assert value == pytest.approx(await r.metric(name, **labels)), name
        assert totals.kv_bytes > 0
        assert totals.toll_s > 0


async def test_requests_are_seen_where_they_are() -> None:
    hold = asyncio.Event()
    async with rig(extensions=PAGE) as r:
        r["d0"].behaviour["local"] = Behaviour(hold=hold)
        task = asyncio.create_task(r.post(STREAM, policy="local"))
        seen = await r.until("/ui/snapshot", lambda now: now["active"])
        (row,) = seen["active"]
        assert (row["choice"], row["phase"], row["decode"], row["status"]) == ("local", "prefill", "d0", "running")
        assert seen["in_flight"] == 1
        hold.set()
        await task
        now = await snapshot(r)
        assert now.active == []
        assert now.recent[0].status == "ok"


async def test_a_viewer_is_told_the_past_and_then_the_present() -> None:
    async with rig(extensions=PAGE) as r:
        await r.post(STREAM, policy="split")
        async with r.session.get(r.url + "/ui/events") as response:
            assert response.headers["content-type"] == "text/event-stream"
            (first, past), (second, now) = await frames(response, 2)
            assert (first, second) == ("history", "snapshot")
            assert [row.choice for row in msgspec.json.decode(past, type=History).rows] == ["split"]
            assert msgspec.json.decode(now, type=Snapshot).totals.requests == 1


async def test_the_page_is_open_and_its_data_is_behind_the_key() -> None:
    async with rig(extensions=PAGE, api_keys=["a-key-of-the-tests"]) as r:
        page = await r.get("/ui/")
        assert page.status == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert (await r.get("/ui/main.js")).headers["content-type"].startswith("text/javascript")
        for path in ("/ui/events", "/ui/snapshot"):
            assert (await r.get(path)).status == 401
        key = {"authorization": "Bearer a-key-of-the-tests"}
        async with r.session.get(r.url + "/ui/snapshot", headers=key) as response:
            body = await response.read()
        assert response.status == 200
        assert b"a-key-of-the-tests" not in body


async def test_addresses() -> None:
    async with rig(extensions=PAGE) as r:
        assert (await r.get("/ui")).status == 200  # by way of a redirect
        assert (await r.get("/ui/nothing.js")).status == 404
        assert (await r.get("/ui/../../etc/passwd")).status == 404
        page = await r.get("/ui/style.css")
        async with r.session.get(r.url + "/ui/style.css", headers={"if-none-match": page.headers["etag"]}) as again:
            assert (again.status, await again.read()) == (304, b"")


async def test_no_prompt_and_no_address_with_a_secret_is_shown() -> None:
    async with rig(extensions=PAGE) as r:
        await r.post(STREAM, policy="split")
        async with r.session.get(r.url + "/ui/events") as response:
            told = b"".join(data for _, data in await frames(response, 2))
        assert b"Nobody may read" not in told
        assert b"a secret for tests only" not in told


async def test_a_worker_that_dies_is_an_alert() -> None:
    async with rig(extensions=PAGE) as r:
        r["p0"].healthy = False
        seen = await r.until("/ui/snapshot", lambda now: any(a["code"] == "no_ready_prefill" for a in now["alerts"]))
        assert {"not_ready", "no_ready_prefill"} <= {alert["code"] for alert in seen["alerts"]}


async def test_too_many_viewers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def small(build: Any) -> Hub:
        return Hub(build, max_viewers=1)

    monkeypatch.setattr(module, "Hub", small)
    async with rig(extensions=PAGE) as r, r.session.get(r.url + "/ui/events") as response:
        await frames(response, 1)
        assert (await r.get("/ui/events")).status == 503


async def test_a_viewer_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    hubs: list[Hub] = []

    def quick(build: Any) -> Hub:
        hubs.append(Hub(lambda: bytes(1 << 20), interval_s=0.01))  # so large that no buffer holds many
        return hubs[0]

    monkeypatch.setattr(module, "Hub", quick)
    monkeypatch.setattr(module, "WRITE_TIMEOUT_S", 0.2)
    async with rig(extensions=PAGE) as r:
        host, port = r.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1)
        writer.write(b"GET /ui/events HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            while not hubs[0].statistics().num_viewers:
                await r.get("/health")
            while hubs[0].statistics().num_viewers:
                await r.get("/health")
            with suppress(ConnectionError):
                while await reader.read(1 << 20):
                    pass  # what the kernel still had; then the end
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def test_viewers_do_not_keep_a_router_from_stopping() -> None:
    drain_s = 2 * PATIENCE_S
    async with rig(extensions=PAGE, limits=msgspec.structs.replace(QUICK, drain_s=drain_s)) as r:
        response = await r.session.get(r.url + "/ui/events")
        await frames(response, 2)
        begun_s = time.monotonic()
    response.close()
    assert time.monotonic() - begun_s < drain_s / 2
