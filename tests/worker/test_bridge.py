"""Engine thread to event loop."""

from __future__ import annotations

import asyncio
import threading

from tollbridge.clock import ManualClock
from tollbridge.engine.base import StepOutput
from tollbridge.worker.bridge import Bridge


def output(number: int) -> StepOutput:
    return StepOutput(request_id=str(number), token_ids=(number,))


class CountingLoop:
    """Stands in for an event loop: counts wake-ups and runs them when told to."""

    def __init__(self) -> None:
        self.calls = []

    def call_soon_threadsafe(self, call) -> None:
        self.calls.append(call)

    def turn(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()


async def test_a_burst_wakes_the_loop_once() -> None:
    loop = CountingLoop()
    bridge = Bridge(loop, ManualClock())
    streams = [bridge.open() for _ in range(64)]
    for number, stream in enumerate(streams):
        stream.sink(output(number))
    assert len(loop.calls) == 1
    loop.turn()
    for number, stream in enumerate(streams):
        assert await stream.next() == [(output(number), 1000.0)]
    streams[0].sink(output(7))
    assert len(loop.calls) == 1, "after a turn the next output wakes it again"


async def test_outputs_of_one_stream_come_in_order_and_together() -> None:
    loop = CountingLoop()
    stream = Bridge(loop, ManualClock()).open()
    for number in range(3):
        stream.sink(output(number))
    loop.turn()
    assert [one.token_ids for one, _ in await stream.next()] == [(0,), (1,), (2,)]


async def test_no_output_is_lost_between_threads() -> None:
    bridge = Bridge(asyncio.get_running_loop(), ManualClock())
    streams = [bridge.open() for _ in range(4)]

    def engine() -> None:
        for number in range(2000):
            for stream in streams:
                stream.sink(output(number))

    thread = threading.Thread(target=engine)
    thread.start()
    for stream in streams:
        seen: list[int] = []
        while len(seen) < 2000:
            async with asyncio.timeout(60):
                seen += [one.token_ids[0] for one, _ in await stream.next()]
        assert seen == list(range(2000))
    thread.join()


async def test_a_cancelled_wait_loses_nothing() -> None:
    loop = CountingLoop()
    stream = Bridge(loop, ManualClock()).open()
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    stream.sink(output(1))
    loop.turn()
    assert len(await stream.next()) == 1


def test_a_closed_loop_is_no_error_for_the_engine() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    stream = Bridge(loop, ManualClock()).open()
    stream.sink(output(1))
    stream.sink(output(2))
