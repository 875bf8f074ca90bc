"""The reflector against a server on loopback: what it sees, and how it takes each way in which a watch goes wrong."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme

from tests.discovery.apiserver import NAMESPACE, ApiServer, make_pod
from tests.discovery.following import following
from tollbridge.clock import SystemClock
from tollbridge.config.cluster import DiscoveryConfig
from tollbridge.discovery.account import Account
from tollbridge.discovery.kubernetes import KubernetesDiscovery, Pace
from tollbridge.errors import ConfigError

QUICK = Pace(watch_s=1.0, grace_s=0.2, list_s=30.0, first_pause_s=0.01, longest_pause_s=0.1)
LONG = Pace(watch_s=50.0)
PATIENT = Pace(watch_s=50.0, first_pause_s=50.0, longest_pause_s=50.0)  # one failure, and it rests
UP = "serving"


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer() as server:
        server.put(make_pod("p0"))
        server.put(make_pod("d0", "decode"))
        yield server


def reflector(server: ApiServer, pace: Pace = QUICK, **more: Any) -> KubernetesDiscovery:
    settings: dict[str, Any] = {"api": server.url, "namespace": NAMESPACE, "account": "/nowhere", **more}
    return KubernetesDiscovery(DiscoveryConfig(kind="kubernetes", **settings), SystemClock(), pace=pace)


async def test_the_life_of_a_pod(server: ApiServer) -> None:
    async with following(reflector(server, LONG)) as seen:
        await seen.until({"p0": UP, "d0": UP})
        server.put(make_pod("d1", "decode", ip=None, ready=False))  # scheduled: nobody to dial yet
        server.put(make_pod("d1", "decode", ready=False))
        await seen.until({"p0": UP, "d0": UP, "d1": "not_ready"})
        server.set_ready("d1", True)
        await seen.until({"p0": UP, "d0": UP, "d1": UP})
        server.drain("d0")
        await seen.until({"p0": UP, "d0": "draining", "d1": UP})
        server.delete("d0")
        await seen.until({"p0": UP, "d1": UP})
        assert (len(server.lists), len(server.watches)) == (1, 1)


async def test_nothing_is_told_before_the_list_is_complete(server: ApiServer) -> None:
    for number in range(5):
        server.put(make_pod(f"x{number}"))
    server.hold.clear()
    async with following(reflector(server, msgspec.structs.replace(LONG, page_pods=3))) as seen:
        await seen.sees(lambda: len(server.lists) == 1)
        assert (seen.told, seen.discovery.statistics().complete) == ([], False)
        server.hold.set()
        await seen.until(dict.fromkeys(["p0", "d0", *(f"x{number}" for number in range(5))], UP))
        assert len(seen.told) == 1
        assert [query.get("continue", "")[-2:] for query in server.lists] == ["", "@3", "@6"]
        assert seen.discovery.statistics().complete


async def test_pods_that_are_none_of_ours_are_counted(server: ApiServer) -> None:
    server.put(make_pod("router", "router"))
    server.put(make_pod("web", None, None))  # the selector leaves it out
    async with following(reflector(server)) as seen:
        await seen.until({"p0": UP, "d0": UP})
        assert seen.discovery.statistics().num_ignored == 1


@pytest.mark.parametrize("by_event", [False, True])
async def test_a_state_that_the_server_forgot(server: ApiServer, by_event: bool) -> None:
    """What came and what went while nobody watched is found by the new list."""
    server.expires_by_event = by_event
    async with following(reflector(server)) as seen:
        await seen.until({"p0": UP, "d0": UP})
        await server.stop()
        server.delete("d0")
        server.put(make_pod("d1", "decode"))
        server.compact()
        await server.start()
        await seen.until({"p0": UP, "d1": UP})
        assert len(server.lists) == 2


async def test_a_restart_of_the_server_needs_no_new_list(server: ApiServer) -> None:
    async with following(reflector(server)) as seen:
        await seen.until({"p0": UP, "d0": UP})
        await server.stop()
        await seen.sees(lambda: seen.discovery.statistics().error is not None)
        assert "cannot be followed" in str(seen.discovery.statistics().error)
        assert seen.now == {"p0": UP, "d0": UP}  # the last known stay
        server.drain("p0")
        await server.start()
        await seen.until({"p0": "draining", "d0": UP})
        assert seen.discovery.statistics().error is None
        assert len(server.lists) == 1


async def test_a_half_open_watch_is_given_up(server: ApiServer) -> None:
    async with following(reflector(server)) as seen:
        await seen.until({"p0": UP, "d0": UP})
        await seen.sees(lambda: server.num_open == 1)
        server.frozen = True
        server.delete("d0")
        await seen.sees(lambda: seen.discovery.statistics().error is not None)
        assert "half open" in str(seen.discovery.statistics().error)
        server.frozen = False
        await seen.until({"p0": UP})
        assert len(server.lists) == 1  # the next watch began where the last one had come to


async def test_bookmarks_keep_a_quiet_watch_young(server: ApiServer) -> None:
    """What the selector hides moves the server's state all the same."""
    server.max_watch_s = 0.2
    async with following(reflector(server)) as seen:
        await seen.until({"p0": UP, "d0": UP})
        await seen.sees(lambda: server.num_open == 1)
        for number in range(20):
            server.put(make_pod(f"other{number}", None, None))
        latest = server.pods["other19"]["metadata"]["resourceVersion"]
        await seen.sees(lambda: server.watches[-1]["resourceVersion"] == latest)
        server.compact()
        server.delete("d0")
        await seen.until({"p0": UP})
        assert len(server.lists) == 1


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
async def test_a_refusal_is_said_and_followed_by_a_pause(server: ApiServer, status: int) -> None:
    server.refuse = (status, {})
    async with following(reflector(server, PATIENT)) as seen:
        await seen.sees(lambda: seen.discovery.statistics().failures_total == 1)
        error = str(seen.discovery.statistics().error)
        assert f"answered {status}: the server is not well" in error
        assert ("needs get, list and watch on pods in models" in error) == (status in (401, 403))
        assert seen.told == []


async def test_a_server_that_says_when_to_come_back_is_obeyed(server: ApiServer) -> None:
    server.refuse = (429, {"Retry-After": "50"})
    async with following(reflector(server)) as seen:
        await seen.sees(lambda: seen.discovery.statistics().failures_total == 1)
        server.refuse = None
        await asyncio.sleep(0.15)  # longer than any pause of its own
        assert server.lists == []


async def test_without_the_right_to_watch_it_does_not_hammer(server: ApiServer) -> None:
    server.refuse_watch = 403
    async with following(reflector(server, PATIENT)) as seen:
        await seen.sees(lambda: seen.discovery.statistics().failures_total == 1)
        assert (len(server.lists), len(server.watches)) == (1, 1)
        assert seen.now == {"p0": UP, "d0": UP}


async def test_a_server_that_closes_every_watch_at_once_is_not_hammered(server: ApiServer) -> None:
    server.max_watch_s = 0.0
    async with following(reflector(server, PATIENT)) as seen:
        await seen.sees(lambda: len(server.watches) == 1 and server.num_open == 0)
        await asyncio.sleep(0.05)
        assert len(server.watches) == 1
        assert seen.discovery.statistics().error is None


async def test_a_slow_list_is_given_up_and_tried_again(server: ApiServer) -> None:
    server.hold.clear()
    async with following(reflector(server, msgspec.structs.replace(QUICK, list_s=0.1))) as seen:
        await seen.sees(lambda: seen.discovery.statistics().failures_total >= 2)
        server.hold.set()
        await seen.until({"p0": UP, "d0": UP})


async def test_the_token_is_read_again(server: ApiServer, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "namespace").write_text(NAMESPACE)
    server.token, server.max_watch_s = "first", 0.1
    async with following(reflector(server, account=str(tmp_path), namespace=None)) as seen:
        await seen.until({"p0": UP, "d0": UP})
        (tmp_path / "token").write_text("second\n")
        server.token = "second"
        server.delete("d0")
        await seen.until({"p0": UP})


async def test_the_servers_certificate_is_verified(tmp_path: Path) -> None:
    ca = trustme.CA()
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert("127.0.0.1").configure_cert(tls)
    async with ApiServer(tls=tls) as server:
        server.put(make_pod("p0"))
        trustme.CA().cert_pem.write_to_path(tmp_path / "ca.crt")
        async with following(reflector(server, account=str(tmp_path))) as seen:
            await seen.sees(lambda: "ertificate" in str(seen.discovery.statistics().error))
            ca.cert_pem.write_to_path(tmp_path / "ca.crt")  # replaced, as the kubelet does
            await seen.until({"p0": UP})


async def test_it_ends_at_once_in_the_middle_of_a_list(server: ApiServer) -> None:
    server.hold.clear()
    async with following(reflector(server)) as seen:
        await seen.sees(lambda: len(server.lists) == 1)


def test_outside_of_a_cluster_it_says_what_is_missing() -> None:
    config = DiscoveryConfig(kind="kubernetes", account="/nowhere")
    with pytest.raises(ConfigError, match=r"discovery\.api"):
        Account(config, environ={})
    with pytest.raises(ConfigError, match=r"discovery\.namespace"):
        Account(config, environ={"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"})


def test_inside_of_a_cluster_it_needs_no_more() -> None:
    config = DiscoveryConfig(kind="kubernetes", account="/nowhere", namespace="models")
    account = Account(config, environ={"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"})
    assert (account.url, account.headers()) == ("https://[fd00::1]:6443", {})
