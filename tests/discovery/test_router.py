"""A router that follows an API server, in front of stub workers: nobody is refused, whatever happens to the pods."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Literal

import aiohttp
import msgspec

from tests.discovery.apiserver import NAMESPACE, ApiServer, make_pod
from tests.support.router_rig import PATIENCE_S, QUICK, Answer, Rig, happens
from tests.support.stub_worker import SECRET, Behaviour, StubWorker
from tollbridge.clock import SystemClock
from tollbridge.config.cluster import ClusterConfig, DiscoveryConfig, RouterConfig
from tollbridge.discovery.kubernetes import KubernetesDiscovery, Pace
from tollbridge.router.limits import Limits
from tollbridge.router.main import listening

PACE = Pace(watch_s=1.0, grace_s=0.3, list_s=30.0, first_pause_s=0.01, longest_pause_s=0.1)
NUM_CLIENTS = 6


class Pods:
    """Stub workers as pods of one API server."""

    def __init__(self, api: ApiServer) -> None:
        self.api = api
        self.stubs: dict[str, StubWorker] = {}
        self.revisions: dict[str, str] = {}

    async def run(self, name: str, role: Literal["prefill", "decode"], revision: str, *, ready: bool = True) -> None:
        stub = self.stubs[name] = StubWorker(name, role)
        self.revisions[name] = revision
        await stub.start()
        port = int(stub.url.rpartition(":")[2])
        labels = {"tollbridge.io/engine": "embedded"}
        self.api.put(make_pod(name, role, revision, ready=ready, ports={"http": port}, labels=labels))

    async def end(self, name: str) -> None:
        """The container ends, then the pod goes."""
        await self.stubs[name].stop()
        self.api.delete(name)

    async def stop(self) -> None:
        for stub in self.stubs.values():
            await stub.stop()


@asynccontextmanager
async def pods() -> AsyncIterator[Pods]:
    """Run an API server with one prefill and one decode worker of revision r1."""
    async with ApiServer() as api:
        found = Pods(api)
        try:
            await found.run("p1", "prefill", "r1")
            await found.run("d1", "decode", "r1")
            yield found
        finally:
            await found.stop()


@asynccontextmanager
async def routed(found: Pods, *, limits: Limits = QUICK) -> AsyncIterator[Rig]:
    """Run a router that splits everything it can."""
    config = DiscoveryConfig(kind="kubernetes", api=found.api.url, namespace=NAMESPACE, account="/nowhere")
    cluster = ClusterConfig(router=RouterConfig(port=0, policy="split", max_queue=0), workers=[], discovery=config)
    discovery = KubernetesDiscovery(config, SystemClock(), pace=PACE)
    async with (
        listening(cluster, SECRET, limits=limits, discovery=discovery) as url,
        aiohttp.ClientSession() as session,
    ):
        yield Rig(url, session, found.stubs)


class Load:
    """Requests one after the other from some clients, streams and whole answers."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.answers: list[Answer] = []
        self._more = asyncio.Event()
        self._numbers: Iterator[int] = itertools.count()

    async def client(self) -> None:
        for number in self._numbers:
            self.answers.append(await self.rig.post({"prompt": f"request {number}", "stream": number % 2 == 0}))
            self._more.set()

    async def some_more(self, number: int = 20) -> None:
        """Wait for the next `number` answers, so that what happens meets requests."""
        wanted = len(self.answers) + number
        async with asyncio.timeout(PATIENCE_S):
            while len(self.answers) < wanted:
                self._more.clear()
                await self._more.wait()

    def pairs(self) -> list[tuple[str, str]]:
        splits = (answer.decision for answer in self.answers if answer.status == 200)
        return [(each["prefill"], each["decode"]) for each in splits if each["choice"] == "split"]


@asynccontextmanager
async def under_load(rig: Rig) -> AsyncIterator[Load]:
    """Send requests while the context lasts; all of them must have been answered well."""
    load = Load(rig)
    async with asyncio.TaskGroup() as group:
        clients = [group.create_task(load.client()) for _ in range(NUM_CLIENTS)]
        yield load
        for client in clients:
            client.cancel()
    assert {answer.status for answer in load.answers} == {200}, [a.body for a in load.answers if a.status != 200][:3]
    assert all(b"error" not in answer.body for answer in load.answers)


@contextmanager
def never_across(found: Pods, load: Load) -> Iterator[None]:
    yield
    pairs = load.pairs()
    assert pairs
    assert all(found.revisions[prefill] == found.revisions[decode] for prefill, decode in pairs), pairs


async def knows(rig: Rig, *names: str) -> None:
    """Wait until exactly these are ready."""
    await rig.until("/fleet", lambda fleet: sorted(w["name"] for w in fleet["workers"] if w["ready"]) == sorted(names))


async def test_a_rolling_update_pairs_nobody_across_revisions() -> None:
    """As a DisaggregatedSet rolls one of two: the new ones come up, then the old ones drain, role by role."""
    async with pods() as found, routed(found) as r, under_load(r) as load:
        with never_across(found, load):
            await load.some_more()
            await found.run("p2", "prefill", "r2")
            await load.some_more()  # a prefill worker of r2 alone
            await found.run("d2", "decode", "r2", ready=False)
            await load.some_more()
            found.api.set_ready("d2", True)
            await knows(r, "p1", "d1", "p2", "d2")
            await load.some_more()
            found.api.drain("p1")
            await knows(r, "d1", "p2", "d2")
            await load.some_more()
            found.api.drain("d1")
            await knows(r, "p2", "d2")
            await found.end("p1")
            await found.end("d1")
            await load.some_more()
        assert {("p1", "d1"), ("p2", "d2")} <= set(load.pairs())
        fleet = (await r.get("/fleet")).json
        assert [(w["name"], w["revision"]) for w in fleet["workers"]] == [("p2", "r2"), ("d2", "r2")]


async def test_churn_while_the_api_server_is_restarted_forgets_and_hangs() -> None:
    async with pods() as found, routed(found) as r, under_load(r) as load:
        with never_across(found, load):
            await found.run("d1b", "decode", "r1")
            await knows(r, "p1", "d1", "d1b")
            await found.api.stop()
            await load.some_more()
            found.api.drain("d1")  # seen only after the restart
            found.api.compact()
            await found.api.start()
            await knows(r, "p1", "d1b")
            await found.end("d1")
            await load.some_more()
            found.api.frozen = True  # every watch is half open from here on
            await found.run("d1c", "decode", "r1")
            await load.some_more()
            found.api.frozen = False
            await knows(r, "p1", "d1b", "d1c")
            for number in range(5):
                await found.run(f"x{number}", "decode", "r1")
                await knows(r, "p1", "d1b", "d1c", f"x{number}")
                found.api.drain(f"x{number}")
                await knows(r, "p1", "d1b", "d1c")
                await found.end(f"x{number}")
            await load.some_more()
        fleet = await r.until(
            "/fleet", lambda fleet: len(fleet["workers"]) == 3 and fleet["discovery"]["error"] is None
        )
        assert fleet["discovery"]["looks_total"] == 2  # the second one after the 410
        async with asyncio.timeout(PATIENCE_S):  # the index looks every half a second
            while b'worker="x' in (await r.get("/metrics")).body:
                pass


async def test_requests_wait_for_the_first_list_instead_of_a_refusal() -> None:
    async with pods() as found:
        found.api.hold.clear()
        async with routed(found, limits=msgspec.structs.replace(QUICK, first_list_s=0.05)) as r:
            health = await r.get("/health")
            assert (health.status, health.json["workers"]) == (503, {})
            asked = [asyncio.create_task(r.post({"prompt": "a"})) for _ in range(5)]
            listed = asyncio.create_task(r.get("/v1/models"))
            await asyncio.wait(asked, timeout=0.1)
            assert not any(task.done() for task in asked)
            found.api.hold.set()
            assert [answer.status for answer in await asyncio.gather(*asked)] == [200] * 5
            assert [card["id"] for card in (await listed).json["data"]] == ["stub-model"]
            assert (await r.get("/health")).status == 200


async def test_a_router_that_restarts_refuses_nobody() -> None:
    async with pods() as found:
        for _ in range(3):
            async with routed(found) as r:
                answer = await r.post({"prompt": "a"})
                assert (answer.status, answer.decision["choice"]) == (200, "split")


async def test_without_any_list_requests_are_refused_in_the_end() -> None:
    async with pods() as found:
        await found.api.stop()
        limits = msgspec.structs.replace(QUICK, first_list_s=0.05, first_patience_s=0.2)
        async with routed(found, limits=limits) as r:
            answer = await r.post({"prompt": "a"})
            assert (answer.status, "Retry-After" in answer.headers) == (503, True)
            fleet = await r.until("/fleet", lambda fleet: fleet["discovery"]["error"] is not None)
            assert "cannot be followed" in fleet["discovery"]["error"]
            assert await r.metric("discovery_up") == 0.0
            await found.api.start()
            await knows(r, "p1", "d1")
            assert await r.metric("discovery_up") == 1.0


async def test_a_draining_worker_finishes_what_it_has_and_gets_nothing_new() -> None:
    async with pods() as found, routed(found) as r:
        hold = asyncio.Event()
        found.stubs["d1"].behaviour["decode"] = Behaviour(hold=hold)
        running = asyncio.create_task(r.post({"prompt": "a", "stream": True}))
        await happens(found.stubs["d1"].arrived["decode"])
        found.api.drain("d1")
        await knows(r, "p1")
        assert "takes nothing new" in (await r.get("/health")).json["workers"]["d1"]["detail"]
        other = await r.post({"prompt": "b"})
        assert (other.decision["decode"], other.decision["reason"]) == ("p1", "no_ready_decode")
        found.api.delete("d1")
        await r.until("/fleet", lambda fleet: len(fleet["workers"]) == 1)
        hold.set()
        answer = await running
        assert (answer.status, answer.decision["decode"], answer.text) == (200, "d1", "Hello world")
        assert found.stubs["d1"].roles() == ["decode"]


async def test_a_pod_that_is_not_ready_gets_nothing_although_it_answers() -> None:
    async with pods() as found, routed(found) as r:
        found.api.set_ready("d1", False)
        await knows(r, "p1")
        assert (await r.post({"prompt": "a"})).decision["decode"] == "p1"
        found.api.set_ready("d1", True)
        await knows(r, "p1", "d1")
        assert (await r.post({"prompt": "a"})).decision["choice"] == "split"


async def test_the_last_known_workers_serve_while_the_api_server_is_away() -> None:
    async with pods() as found, routed(found) as r:
        await found.api.stop()
        await r.until("/fleet", lambda fleet: fleet["discovery"]["error"] is not None)
        assert (await r.post({"prompt": "a"})).decision["choice"] == "split"
        assert (await r.get("/health")).status == 200


async def test_a_pod_that_is_made_anew_under_its_name_is_another_worker() -> None:
    """As a LeaderWorkerSet does: the same name, another address."""
    async with pods() as found, routed(found) as r:
        await knows(r, "p1", "d1")
        await found.end("d1")
        await found.run("d1", "decode", "r1")
        uid = found.api.pods["d1"]["metadata"]["uid"]
        await r.until("/fleet", lambda fleet: any(w["uid"] == uid and w["ready"] for w in fleet["workers"]))
        answer = await r.post({"prompt": "a"})
        assert (answer.decision["decode"], len(found.stubs["d1"].seen)) == ("d1", 1)


async def test_a_stream_goes_on_with_a_worker_of_the_same_revision() -> None:
    async with pods() as found, routed(found) as r:
        await found.run("a2", "decode", "r2")  # first by name
        await found.run("d1b", "decode", "r1")
        await knows(r, "p1", "d1", "a2", "d1b")
        for name in ("d1", "d1b"):
            found.stubs[name].behaviour["decode"] = Behaviour("die", after=2)
        answer = await r.post({"prompt": "a", "stream": True, "temperature": 0, "max_tokens": 8})
        first = answer.decision["decode"]
        assert answer.text == "Hello world"
        record = await r.record(answer.decision["id"])
        assert {first, record["decision"]["decode"]} == {"d1", "d1b"}


async def test_connections_to_those_that_left_are_closed() -> None:
    async with pods() as found, routed(found) as r:
        await found.run("d2", "decode", "r1")
        await knows(r, "p1", "d1", "d2")
        stub = found.stubs["d2"]
        assert stub.num_connections() > 0  # the health check's is kept
        found.api.delete("d2")
        async with asyncio.timeout(PATIENCE_S):
            while stub.num_connections():
                await asyncio.sleep(0.005)
