"""The whole examination over stub workers with real KV listeners; test_doctor.py has real workers."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest

from tests.support.stub_worker import SECRET, StubWorker, stubs
from tests.transfer.harness import FINGERPRINT, SHORT, Cache, Pair, make_pair
from tollbridge.config.cluster import ClusterConfig, RouterConfig
from tollbridge.doctor.examine import examine_cluster
from tollbridge.doctor.findings import Finding
from tollbridge.doctor.targets import Target
from tollbridge.router.main import listening
from tollbridge.transfer.tcp import TcpSender

OTHER_SECRET = b"another secret 0123456789"


@pytest.fixture
def listeners() -> Iterator[dict[str, str]]:
    """KV addresses by what is behind them."""
    pairs: dict[str, Pair] = {
        "p": make_pair("tcp", replace(SHORT, secret=SECRET)),
        "d": make_pair("tcp", replace(SHORT, secret=SECRET)),
        "other-secret": make_pair("tcp", replace(SHORT, secret=OTHER_SECRET)),
    }
    yield {name: "{}:{}".format(*pair.sender.address) for name, pair in pairs.items()}
    for pair in pairs.values():
        pair.close()


@asynccontextmanager
async def workers(listeners: dict[str, str]) -> AsyncIterator[tuple[StubWorker, StubWorker, list[Target]]]:
    p, d = StubWorker("p0", "prefill"), StubWorker("d0", "decode")
    p.kv, d.kv = listeners["p"], listeners["d"]
    async with stubs(p, d):
        targets = [Target(name="p0", prefer="prefill", url=p.url), Target(name="d0", prefer="decode", url=d.url)]
        yield p, d, targets


async def examine(targets: list[Target], router: str | None = None, secret: bytes | None = SECRET) -> list[Finding]:
    return await examine_cluster(targets, router=router, secret=secret, api_key=None)


def failures(findings: list[Finding]) -> dict[tuple[str, str], str]:
    assert all(finding.mend for finding in findings if finding.ok is False)
    return {(finding.check, finding.subject): finding.said for finding in findings if finding.ok is False}


def said(findings: list[Finding], check: str, subject: str) -> str:
    return next(finding.said for finding in findings if (finding.check, finding.subject) == (check, subject))


async def test_sound(listeners: dict[str, str]) -> None:
    async with workers(listeners) as (_, _, targets):
        findings = await examine(targets)
    assert failures(findings) == {}
    passed = {finding.check for finding in findings if finding.ok}
    assert passed == {"http", "model", "connector", "kv port", "secret", "clock", "fingerprint", "split"}
    assert "decode loaded 99 of 100 prompt tokens" in said(findings, "split", "p0>d0")


async def test_another_secret(listeners: dict[str, str]) -> None:
    async with workers(listeners) as (_, d, targets):
        d.kv = listeners["other-secret"]
        broken = failures(await examine(targets))
    assert broken == {("secret", "d0"): f"{listeners['other-secret']} does not accept ours"}


async def test_another_model(listeners: dict[str, str]) -> None:
    async with workers(listeners) as (_, d, targets):
        d.model = "other"
        findings = await examine(targets)
    assert failures(findings) == {("model", "p0>d0"): "p0 serves stub-model; d0 serves other"}
    assert said(findings, "split", "p0>d0").startswith("not tried")


async def test_no_connector(listeners: dict[str, str]) -> None:
    async with workers(listeners) as (p, _, targets):
        p.kv = None
        broken = failures(await examine(targets))
    assert list(broken) == [("connector", "p0")]


async def test_wrong_kv_port(listeners: dict[str, str]) -> None:
    async with workers(listeners) as (p, d, targets):
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            p.kv = f"127.0.0.1:{closed.getsockname()[1]}"
            d.kv = d.url.removeprefix("http://")
            broken = failures(await examine(targets))
    assert broken[("kv port", "p0")] == f"{p.kv} cannot be reached: Connection refused"
    assert "does not speak the KV protocol" in broken[("kv port", "d0")]


async def test_fingerprints_differ(listeners: dict[str, str]) -> None:
    cache = Cache(64, 16, seed=1)
    fingerprint = msgspec.structs.replace(FINGERPRINT, dtype="float64")
    sender = TcpSender(cache.memory, fingerprint, replace(SHORT, secret=SECRET))
    async with workers(listeners) as (_, d, targets):
        try:
            d.kv = "{}:{}".format(*sender.address)
            broken = failures(await examine(targets))
        finally:
            sender.close()
    assert broken[("fingerprint", "p0>d0")] == f"dtype is {FINGERPRINT.dtype!r} on p0 and 'float64' on d0"


async def test_stopped_worker(listeners: dict[str, str]) -> None:
    async with workers(listeners) as (_, d, targets):
        await d.stop()
        broken = failures(await examine(targets))
    assert broken == {
        ("http", "d0"): f"{d.url} does not answer: Connection refused",
        ("split", "all"): "fewer than two workers answer",
    }


async def test_split_that_does_not_happen(listeners: dict[str, str]) -> None:
    async with workers(listeners) as (_, d, targets):
        d.report = {"decode": {"loaded_tokens": 0, "transfer": None}}
        broken = failures(await examine(targets))
    assert "loaded 0" in broken[("split", "p0>d0")]


async def test_of_a_router(listeners: dict[str, str]) -> None:
    """The fleet comes from it, without the secret the split goes through it only, and a router that is down is told."""
    async with workers(listeners) as (p, d, targets):
        cluster = ClusterConfig(router=RouterConfig(port=0), workers=[p.config, d.config])
        async with listening(cluster, SECRET) as url:
            findings = await examine([], router=url, secret=None)
        gone = await examine(targets, router=url)
    assert failures(findings) == {}
    assert "p0>d0 verified" in said(findings, "split", "router")
    assert said(findings, "secret", "p0") == "TOLLBRIDGE_SECRET is not set here"
    assert failures(gone) == {("http", "router"): f"{url} does not answer as a router: Connection refused"}


async def test_router_that_takes_no_override(listeners: dict[str, str]) -> None:
    async with workers(listeners) as (p, d, _):
        router = RouterConfig(port=0, allow_override="never")
        async with listening(ClusterConfig(router=router, workers=[p.config, d.config]), SECRET) as url:
            findings = await examine([], router=url)
    assert failures(findings) == {}
    assert "from others only" in said(findings, "split", "router")
