"""Names that change, vanish and do not answer; the real resolver against a server on loopback."""

from __future__ import annotations

import dns.rcode
import pytest

from tests.discovery.following import Following
from tests.discovery.nameserver import name_server
from tollbridge.clock import ManualClock
from tollbridge.config.address import Address
from tollbridge.config.cluster import DiscoveryConfig, WorkerConfig
from tollbridge.discovery import dns as discovery_dns
from tollbridge.discovery.dns import Answer, DnsDiscovery, SystemResolver

CONFIG = DiscoveryConfig(kind="dns", min_ttl_s=2, max_ttl_s=30)
P = WorkerConfig(name="p", prefer="prefill", engine="vllm", url="http://prefill:8000", kv="prefill:7801")
D = WorkerConfig(name="d", prefer="decode", url="http://decode:8000", events="tcp://x:5600", replay="tcp://x:5601")


class Names:
    """A resolver that knows what it is told; None: it does not answer."""

    def __init__(self, **found: list[str] | None) -> None:
        self.found = found
        self.ttl_s = 10.0
        self.asked: list[str] = []

    async def ask(self, name: str) -> Answer:
        self.asked.append(name)
        hosts = self.found[name]
        if hosts is None:
            raise LookupError(f"{name} (A): no answer")
        return Answer(tuple(Address(host=host, port=0) for host in hosts), self.ttl_s)


class World:
    def __init__(self, names: Names, *workers: WorkerConfig) -> None:
        self.clock = ManualClock()
        self.names = names
        self.discovery = DnsDiscovery(workers or (P, D), CONFIG, self.clock, resolver=names)
        self.seen = Following(self.discovery)

    async def look(self, after_s: float = 0.0) -> float:
        self.clock.advance(after_s)
        return await self.discovery.look(self.seen.tell)

    @property
    def told(self) -> list[str]:
        return sorted(self.seen.now)


async def test_each_address_is_a_worker() -> None:
    world = World(Names(prefill=["10.0.0.1", "10.0.0.2"], decode=["fd00::7"]))
    assert await world.look() == 10.0
    workers = {endpoint.name: endpoint.worker for endpoint in world.seen.told[0]}
    assert sorted(workers) == ["d-fd00--7", "p-10-0-0-1", "p-10-0-0-2"]
    p, d = workers["p-10-0-0-2"], workers["d-fd00--7"]
    assert (p.url, p.kv, p.host, p.prefer, p.engine) == (
        "http://10.0.0.2:8000", "10.0.0.2:7801", "10.0.0.2", "prefill", "vllm",
    )  # fmt: skip
    assert (d.url, d.kv, d.events, d.replay) == (
        "http://[fd00::7]:8000", "[fd00::7]:0", "tcp://[fd00::7]:5600", "tcp://[fd00::7]:5601",
    )  # fmt: skip


@pytest.mark.parametrize(("ttl_s", "lives_s"), [(0.0, 2.0), (10.0, 10.0), (3600.0, 30.0)])
async def test_a_name_is_asked_again_when_its_answer_has_lived(ttl_s: float, lives_s: float) -> None:
    world = World(Names(prefill=["10.0.0.1"], decode=["10.0.0.2"]))
    world.names.ttl_s = ttl_s
    assert await world.look() == lives_s
    await world.look(lives_s - 0.1)
    assert len(world.names.asked) == 2
    await world.look(0.2)
    assert len(world.names.asked) == 4


async def test_who_comes_and_goes() -> None:
    world = World(Names(prefill=["10.0.0.1", "10.0.0.2"], decode=["10.0.0.9"]))
    await world.look()
    world.names.found["prefill"] = ["10.0.0.2", "10.0.0.3"]
    await world.look(11)
    assert world.told == ["d-10-0-0-9", "p-10-0-0-2", "p-10-0-0-3"]


async def test_no_answer_keeps_the_last_one_and_says_so() -> None:
    world = World(Names(prefill=["10.0.0.1"], decode=["10.0.0.9"]))
    await world.look()
    world.names.found["prefill"] = None
    world.names.found["decode"] = ["10.0.0.8"]
    assert await world.look(11) == 2.0
    assert world.told == ["d-10-0-0-8", "p-10-0-0-1"]
    assert "prefill (A): no answer" in str(world.discovery.statistics().error)
    world.names.found["prefill"] = ["10.0.0.1"]
    await world.look(2)
    assert world.discovery.statistics().error is None


async def test_an_empty_answer_must_come_twice() -> None:
    world = World(Names(prefill=["10.0.0.1"], decode=["10.0.0.9"]))
    await world.look()
    world.names.found["prefill"] = []
    assert await world.look(11) == 2.0
    assert world.told == ["d-10-0-0-9", "p-10-0-0-1"]
    await world.look(2)
    assert world.told == ["d-10-0-0-9"]
    assert world.discovery.statistics().error is None


async def test_an_empty_answer_between_two_others_is_forgotten() -> None:
    world = World(Names(prefill=["10.0.0.1"], decode=["10.0.0.9"]))
    await world.look()
    for hosts in ([], ["10.0.0.1"], []):
        world.names.found["prefill"] = hosts
        await world.look(11)
    assert world.told == ["d-10-0-0-9", "p-10-0-0-1"]


async def test_nothing_is_told_while_nothing_is_known() -> None:
    world = World(Names(prefill=None, decode=None))
    await world.look()
    assert world.seen.told == []
    world.names.found["decode"] = ["10.0.0.9"]  # better half of them than none
    await world.look(2)
    assert world.told == ["d-10-0-0-9"]
    assert world.discovery.statistics().error is not None


async def test_an_address_needs_no_name_server() -> None:
    world = World(Names(), WorkerConfig(name="a", url="http://10.1.1.1:80"))
    assert await world.look() == CONFIG.max_ttl_s
    assert (world.told, world.names.asked) == (["a"], [])


async def test_addresses_from_a_real_server() -> None:
    async with name_server() as (server, real):
        server.records["prefill.models", "A"] = ["10.0.0.2", "10.0.0.1"]
        server.records["prefill.models", "AAAA"] = ["fd00::1"]  # the same pods
        server.records["six.models", "AAAA"] = ["fd00::2"]
        resolver = SystemResolver(real)
        answer = await resolver.ask("prefill.models")
        assert [address.host for address in answer.addresses] == ["10.0.0.1", "10.0.0.2"]
        assert answer.ttl_s == 7
        assert [address.host for address in (await resolver.ask("six.models")).addresses] == ["fd00::2"]
        assert (await resolver.ask("nobody.models")).addresses == ()


async def test_service_records_know_the_port() -> None:
    async with name_server() as (server, real):
        name = "_http._tcp.prefill.models"
        server.records[name, "SRV"] = ["0 50 8101 a.prefill.models.", "0 50 8102 b.prefill.models."]
        server.records["a.prefill.models", "A"] = ["10.0.0.1"]
        server.records["b.prefill.models", "A"] = ["10.0.0.2"]
        worker = WorkerConfig(name="p", url=f"http://{name}:0")
        discovery = DnsDiscovery([worker], CONFIG, ManualClock(), resolver=SystemResolver(real))
        seen = Following(discovery)
        assert await discovery.look(seen.tell) == 7.0
        urls = {endpoint.name: endpoint.worker.url for endpoint in seen.told[0]}
        assert urls == {"p-10-0-0-1-8101": "http://10.0.0.1:8101", "p-10-0-0-2-8102": "http://10.0.0.2:8102"}


async def test_a_server_that_fails_or_is_silent_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery_dns, "LIFETIME_S", 0.3)
    async with name_server() as (server, real):
        resolver = SystemResolver(real)
        server.rcode = dns.rcode.SERVFAIL
        with pytest.raises(LookupError, match="prefill"):
            await resolver.ask("prefill")
        server.rcode, server.silent = None, True
        with pytest.raises(LookupError, match="prefill"):
            await resolver.ask("prefill")
