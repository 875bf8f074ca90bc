"""Workers that enter and leave while requests name them."""

from __future__ import annotations

import asyncio

import pytest

from tollbridge.clock import ManualClock
from tollbridge.config.cluster import SloConfig, WorkerConfig
from tollbridge.cost.model import MAX_LINKS, CostModel
from tollbridge.discovery.base import Endpoint, Standing
from tollbridge.errors import UnavailableError
from tollbridge.router.fleet import MAX_GONE, Fleet
from tollbridge.router.learn import Learner
from tollbridge.router.metrics import RouterMetrics
from tollbridge.router.roster import Roster
from tollbridge.wire.decision import Decision, Happened


class World:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.fleet = Fleet((), clock=self.clock)
        self.metrics = RouterMetrics()
        self.learner = Learner(
            cost=CostModel(), slo=SloConfig(), explore=0.0, fleet=self.fleet, clock=self.clock, metrics=self.metrics
        )
        self.roster = Roster(self.fleet, self.metrics, self.learner)

    def told(self, *endpoints: Endpoint) -> None:
        self.roster.told(endpoints)
        self.fleet.check()

    def names(self) -> list[str]:
        return [worker.name for worker in self.fleet]

    def healthy(self, *names: str) -> None:
        for name in names:
            self.fleet[name].judge(healthy=True)


def at(name: str, uid: str = "", standing: Standing = "serving", **more: object) -> Endpoint:
    config = WorkerConfig(name=name, url=f"http://{name}:8000", **more)  # type: ignore[arg-type]
    return Endpoint(worker=config, uid=uid, standing=standing)


def test_who_is_told_is_in_the_fleet_and_nobody_else() -> None:
    world = World()
    world.told(at("a"), at("b"))
    assert world.names() == ["a", "b"]
    a = world.fleet["a"]
    world.told(at("c"), at("a"))
    assert world.names() == ["a", "c"]
    assert world.fleet["a"] is a
    world.told()
    assert world.names() == []


def test_another_uid_or_another_address_is_another_worker() -> None:
    world = World()
    world.told(at("a", "one"))
    first = world.fleet["a"]
    world.healthy("a")
    world.told(at("a", "two"))
    second = world.fleet["a"]
    assert second is not first
    assert (first.left, first.ready, second.ready) == (True, False, False)  # nobody has checked the new one
    world.told(at("a", "two", kv="a:7801"))
    assert world.fleet["a"] is not second


def test_standing_and_health_together_make_ready() -> None:
    world = World()
    world.told(at("a"))
    worker = world.fleet["a"]
    assert not worker.ready
    worker.judge(healthy=True)
    assert worker.ready
    world.told(at("a", standing="not_ready"))
    assert (worker.ready, worker.why) == (False, "Its pod is not ready.")
    assert worker.recheck.is_set()
    world.told(at("a"))
    assert worker.ready  # at once: its health is known
    world.told(at("a", standing="draining"))
    assert not worker.ready
    assert "takes nothing new" in worker.why
    assert world.metrics.registry.get_sample_value("tollbridge_router_worker_ready", {"worker": "a"}) == 0.0


def test_a_request_may_name_a_worker_that_has_left() -> None:
    world = World()
    world.told(at("a"))
    worker = world.fleet["a"]
    with world.fleet.serving(worker, "decode"):
        world.told()
        assert world.fleet["a"] is worker
        assert "a" not in world.fleet
        assert worker not in list(world.fleet)
    with pytest.raises(UnavailableError, match="'b' has left"):
        world.fleet["b"]


def test_those_that_left_are_forgotten_in_the_end() -> None:
    world = World()
    for number in range(MAX_GONE + 2):
        world.told(at(f"w{number}"))
    with pytest.raises(UnavailableError):
        world.fleet["w0"]
    assert world.fleet["w1"].left


def test_it_is_watched_as_long_as_somebody_waits_for_it() -> None:
    world = World()
    world.told(at("a"))
    worker = world.fleet["a"]
    worker.waits.add(lambda _: None)
    world.told()
    assert not worker.is_done
    worker.waits.clear()
    assert worker.is_done


@pytest.mark.parametrize("url", ["http://odd:0", "http://[zz]:80", "http://[::1:80", ""])
def test_an_address_that_is_none_is_left_out(url: str) -> None:
    world = World()
    world.told(Endpoint(worker=WorkerConfig(name="odd", url=url)), at("a"))
    assert world.names() == ["a"]


def test_its_series_go_with_it() -> None:
    world = World()
    world.told(at("a"), at("b"))
    for name in ("a", "b"):
        world.metrics.worker_ready.labels(name).set(1)
        world.metrics.upstream_errors.labels(name, "decode").inc()
    world.told(at("b"))
    values = {
        (sample.name, sample.labels["worker"])
        for family in world.metrics.registry.collect()
        for sample in family.samples
        if "worker" in sample.labels and not sample.name.endswith("_created")
    }
    assert {worker for _, worker in values} == {"b"}
    assert len(values) == 2


async def test_arrivals_are_those_that_are_there_and_those_that_come() -> None:
    world = World()
    world.told(at("a"))
    arrivals = world.fleet.arrivals()
    assert (await anext(arrivals)).name == "a"
    waiting = asyncio.ensure_future(anext(arrivals))
    await asyncio.sleep(0)
    world.told(at("a"), at("b"))
    assert (await waiting).name == "b"
    await arrivals.aclose()
    world.told(at("c"))  # and nobody listens


async def test_it_is_known_who_serves_once_each_has_been_checked() -> None:
    world = World()
    first = asyncio.create_task(world.roster.first())
    await asyncio.sleep(0)
    world.told(at("a"))
    await asyncio.sleep(0)
    assert not world.roster.known.is_set()
    world.fleet["a"].checked.set()
    await first
    assert world.roster.known.is_set()


def _lesson(world: World, decode: str) -> None:
    decision = Decision(id="r", policy="local", choice="local", decode=decode, reason="policy", why="")
    lesson = world.learner.lesson(decision)
    world.told(at("z"))  # it leaves in the middle of the request
    lesson.first_token()
    happened = Happened(status="ok", ttft_s=0.5, prompt_tokens=1000, completion_tokens=1, total_s=0.6)
    lesson.end(happened, decision)


def test_what_was_learnt_of_those_that_left_helps_those_that_come() -> None:
    world = World()
    world.told(at("a"))
    _lesson(world, "a")
    assert world.learner.cost.engine("z").known
    assert world.learner.engines.keys() <= {"z", "a"}
    own = world.learner.cost.own_engine("z")
    for number in range(1, 20):
        own.observe_prefill(0.001 * number, 100 * number, 0, 512, num_decodes=0)
    world.told(at("z"), at("y"))
    world.told(at("z"))
    assert set(world.learner.cost.statistics(0.0).engines) == {"z"}


def test_links_of_hosts_that_are_gone_are_forgotten_when_there_are_many() -> None:
    cost = CostModel()
    for number in range(MAX_LINKS):
        cost.link(f"h{number}", "d")
    cost.keep({"w"}, {"h0", "d"})
    assert len(cost._links) == MAX_LINKS
    cost.link("one", "more")
    cost.keep({"w"}, {"h0", "d"})
    assert list(cost._links) == [("h0", "d")]
