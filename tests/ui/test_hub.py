"""One picture for all who look, none when nobody does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tollbridge.ui.hub import Hub


class Ticks:
    """A sleep that ends when the test says so."""

    def __init__(self) -> None:
        self.sleeping = asyncio.Event()
        self._go = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self.sleeping.set()
        await self._go.wait()
        self._go.clear()

    async def tick(self) -> None:
        """Let the next picture be built, and return once it has been."""
        await asyncio.wait_for(self.sleeping.wait(), 60)
        self.sleeping.clear()
        self._go.set()
        await asyncio.wait_for(self.sleeping.wait(), 60)


@asynccontextmanager
async def hub(build: object, **more: object) -> AsyncIterator[tuple[Hub, Ticks]]:
    ticks = Ticks()
    it = Hub(build, sleep=ticks.sleep, **more)
    task = asyncio.create_task(it.run())
    try:
        yield it, ticks
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class Painter:
    def __init__(self) -> None:
        self.number = 0

    def __call__(self) -> bytes:
        self.number += 1
        return str(self.number).encode()


async def test_each_picture_is_built_once_for_all() -> None:
    async with hub(paint := Painter()) as (it, ticks):
        with it.viewer() as one, it.viewer() as other:
            seen = [one.pictures(), other.pictures()]
            assert [await anext(each) for each in seen] == [b"1", b"1"]
            await ticks.tick()
            assert [await anext(each) for each in seen] == [b"2", b"2"]
        assert paint.number == 2


async def test_nothing_is_built_when_nobody_looks() -> None:
    async with hub(paint := Painter()) as (it, ticks):
        for _ in range(20):
            await asyncio.sleep(0)
        assert paint.number == 0
        with it.viewer() as viewer:
            await anext(viewer.pictures())
        ticks._go.set()
        for _ in range(20):
            await asyncio.sleep(0)
        assert (paint.number, it.statistics().num_viewers) == (1, 0)
        with it.viewer() as viewer:  # and begins again
            assert await anext(viewer.pictures()) == b"2"


async def test_a_slow_viewer_misses_pictures_and_holds_one() -> None:
    async with hub(Painter()) as (it, ticks):
        with it.viewer() as slow:
            for _ in range(3):
                await ticks.tick()
            assert await anext(slow.pictures()) == b"4"
            assert it.statistics().missed_total == 3


async def test_a_picture_that_fails_does_not_end_the_others() -> None:
    calls = 0

    def build() -> bytes:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ValueError("no paint")
        return b"fine"

    async with hub(build) as (it, ticks):
        with it.viewer() as viewer:
            await ticks.tick()
            assert await anext(viewer.pictures()) == b"fine"


async def test_viewers_are_bounded_and_let_go() -> None:
    async with hub(Painter(), max_viewers=1) as (it, _):
        with it.viewer() as viewer:
            assert it.is_full
            it.close()
            assert [picture async for picture in viewer.pictures()] == []
        assert it.is_full  # closed
