"""The index fed over real sockets by real block pools, against what those pools really hold."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tollbridge.clock import ManualClock
from tollbridge.config.cluster import WorkerConfig
from tollbridge.kv.content import Content
from tollbridge.kv.hashes import prompt_hashes
from tollbridge.kv.pool import BlockPool
from tollbridge.router.fleet import Fleet, Worker
from tollbridge.router.index import IndexFeeder
from tollbridge.router.limits import Limits
from tollbridge.router.load import Report
from tollbridge.router.sources import Source
from tollbridge.worker.events import EventPublisher

PATIENCE_S = 60.0
SIZES = {"w0": 16, "w1": 8}


class Cache:
    """A worker reduced to its prefix cache and its publisher."""

    def __init__(self, clock: ManualClock, block_size: int, num_blocks: int = 40) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.publisher = EventPublisher("tcp://127.0.0.1:0", self.pool.take_events, clock)

    def serve(self, prompt: list[int], salt: str | None = None) -> None:
        """Compute what is not cached, and let go of it."""
        hashes = prompt_hashes(prompt, self.pool.block_size, cache_salt=salt)
        hits = self.pool.lookup(hashes)
        self.pool.acquire(hits)
        new = self.pool.allocate(len(hashes) - len(hits))
        first, size = len(hits), self.pool.block_size
        if new:
            self.pool.commit(
                new,
                hashes[first:],
                parent=hashes[first - 1] if first else None,
                token_ids=prompt[first * size : len(hashes) * size],
                cache_salt=salt,
            )
        self.pool.release([*hits, *new])

    def cached(self, prompt: list[int], salt: str | None = None) -> int:
        hashes = prompt_hashes(prompt, self.pool.block_size, cache_salt=salt)
        return len(self.pool.lookup(hashes)) * self.pool.block_size


class World:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.fleet = Fleet([WorkerConfig(name=name, url=f"http://{name}:1") for name in SIZES], clock=self.clock)
        self.feeder = IndexFeeder(self.fleet, Limits(), self.clock)
        self.caches = {name: Cache(self.clock, size) for name, size in SIZES.items()}
        for worker in self.fleet:
            self.born(worker, "first")

    def born(self, worker: Worker, incarnation: str) -> None:
        publisher = self.caches[worker.name].publisher
        worker.ready, worker.incarnation = True, incarnation
        worker.events = Source(publisher.endpoint, publisher.replay_endpoint)
        worker.load.told(Report(block_size=SIZES[worker.name]), 0.0)

    def tick(self) -> None:
        self.clock.advance(1.0)
        for cache in self.caches.values():
            cache.publisher.tick()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                for cache in self.caches.values():
                    cache.publisher.tick()
                await asyncio.sleep(0.01)

    def all_listen(self) -> bool:
        return all(self.feeder.listens(worker) for worker in self.fleet)

    def knows(self, prompt: list[int], salt: str | None = None) -> bool:
        """Return whether the index says exactly what the pools would."""
        found = self.feeder.match(Content.of_tokens(prompt, salt=salt))
        return all(found.get(name, 0) == cache.cached(prompt, salt) for name, cache in self.caches.items())


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    made = World()
    task = asyncio.create_task(made.feeder.run())
    try:
        yield made
        made.feeder.index.check()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for cache in made.caches.values():
            cache.publisher.close()


async def test_it_follows_caches_that_fill_and_evict() -> None:
    rng = random.Random(5)
    prefixes = [[rng.randrange(1000) for _ in range(rng.randrange(20, 120))] for _ in range(6)]
    prompts = [[*rng.choice(prefixes), *(rng.randrange(1000) for _ in range(rng.randrange(60)))] for _ in range(60)]
    async with world() as w:
        for prompt in prompts:
            w.caches[rng.choice(list(SIZES))].serve(prompt, rng.choice([None, None, "salt"]))
            w.tick()
        for prompt in prompts + prefixes:
            for salt in (None, "salt"):
                await w.until(lambda prompt=prompt, salt=salt: w.knows(prompt, salt))  # type: ignore[misc]
        assert w.feeder.index.statistics().removed_total > 0
        assert any(w.feeder.match(Content.of_tokens(prompt)) for prompt in prompts)


async def test_a_worker_that_was_there_before_the_router() -> None:
    w = World()
    w.caches["w0"].serve([1] * 64)
    w.tick()
    task = asyncio.create_task(w.feeder.run())
    try:
        await w.until(lambda: w.feeder.match(Content.of_tokens([1] * 64)) == {"w0": 64})
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for cache in w.caches.values():
            cache.publisher.close()


async def test_another_incarnation_begins_with_nothing() -> None:
    async with world() as w:
        worker = w.fleet["w0"]
        w.caches["w0"].serve([1] * 64)
        await w.until(lambda: w.feeder.match(Content.of_tokens([1] * 64)) == {"w0": 64})
        old = w.caches["w0"]
        w.caches["w0"] = Cache(w.clock, 16)
        w.born(worker, "second")
        await w.until(lambda: w.feeder.match(Content.of_tokens([1] * 64)) == {})
        w.caches["w0"].serve([2] * 64)
        await w.until(lambda: w.feeder.match(Content.of_tokens([2] * 64)) == {"w0": 64})
        old.publisher.close()


async def test_what_was_sent_counts_before_the_worker_tells() -> None:
    async with world() as w:
        await w.until(w.all_listen)
        w.feeder.sent(w.fleet["w1"], Content.of_tokens([3] * 20))
        assert w.feeder.match(Content.of_tokens([3] * 20)) == {"w1": 16}
        w.clock.advance(Limits().expect_told_s)
        await w.until(lambda: w.feeder.match(Content.of_tokens([3] * 20)) == {})


async def test_what_is_on_its_way_to_a_worker_that_tells_does_not_count_before_it_is_there() -> None:
    async with world() as w:
        await w.until(w.all_listen)
        w.feeder.sent(w.fleet["w1"], Content.of_tokens([3] * 20), loads=True)
        assert w.feeder.match(Content.of_tokens([3] * 20)) == {}
        w.caches["w1"].serve([3] * 20)
        await w.until(lambda: w.feeder.match(Content.of_tokens([3] * 20)) == {"w1": 16})


async def test_a_worker_without_events_is_known_by_what_was_sent() -> None:
    clock = ManualClock()
    fleet = Fleet([WorkerConfig(name="w", url="http://w:1", events=None)], clock=clock)
    feeder = IndexFeeder(fleet, Limits(), clock)
    text = Content.of_text(b"You are a toll collector. " * 20)
    feeder.sent(fleet["w"], text)
    feeder.sent(fleet["w"], Content.of_tokens([1] * 32), loads=True)
    assert feeder.match(text) == {"w": 520 // 64 * 64}
    clock.advance(Limits().expect_told_s + 1)
    assert feeder.match(Content.of_tokens([1] * 40)) == {"w": 32}


async def test_of_a_worker_without_events_no_more_is_expected_than_it_has_room_for() -> None:
    clock = ManualClock()
    fleet = Fleet([WorkerConfig(name="w", url="http://w:1", events=None)], clock=clock)
    feeder = IndexFeeder(fleet, Limits(), clock)
    fleet["w"].load.told(Report(block_size=16, total_kv_tokens=64), 0.0)
    old, new = Content.of_tokens([1] * 48), Content.of_tokens([2] * 48)
    feeder.sent(fleet["w"], old)
    feeder.sent(fleet["w"], new)
    assert (feeder.match(old), feeder.match(new)) == ({"w": 16}, {"w": 48})
    fleet["w"].load.told(Report(block_size=16, total_kv_tokens=64, caches_prefixes=False), 0.0)
    feeder.sent(fleet["w"], Content.of_tokens([3] * 48))
    assert feeder.match(Content.of_tokens([3] * 48)) == {}
    feeder.index.check()


async def test_an_endpoint_that_is_none_ends_nobodys_following_but_its_own() -> None:
    async with world() as w:
        await w.until(w.all_listen)
        odd = w.fleet.enter(WorkerConfig(name="odd", url="http://odd:1"))
        odd.events = Source("tcp://not a host:5557", None)
        odd.judge(healthy=True)
        await w.until(lambda: odd.events is None)
        prompt = list(range(32))
        w.caches["w0"].serve(prompt)
        await w.until(lambda: w.feeder.match(Content.of_tokens(prompt)) == {"w0": 32})


async def test_who_left_is_followed_no_more_and_a_name_may_come_back() -> None:
    async with world() as w:
        await w.until(w.all_listen)
        for _ in range(2):
            w.fleet.leave(w.fleet["w0"])
            w.fleet.enter(WorkerConfig(name="w0", url="http://w0:1"))
        w.fleet.leave(w.fleet["w0"])
        w.feeder.sent(w.fleet["w0"], Content.of_tokens([1] * 32))  # a straggler
        await w.until(lambda: w.feeder.following.keys() == {"w1"})
        assert w.feeder.index.statistics().num_workers <= 1
        w.feeder.index.check()
