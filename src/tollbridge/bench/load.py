"""One window of load by one process: open loop, closed loop, and steady streams that run beside either."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from tollbridge.bench.answer import Answer
from tollbridge.bench.client import Client, Target, now
from tollbridge.bench.records import Planned, Sample
from tollbridge.errors import UpstreamError

STEADY = "steady"
_EARLY_S = 0.0005  # timers have a resolution of 1 ms: what is due so soon goes out now
_WARM_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a window is, beside its requests."""

    cell: str
    block: int
    arm: str
    duration_s: float = 0.0  # it lasts at least so long
    concurrency: int | None = None  # closed loop of so many; None: open loop
    drain_s: float = 60.0  # what has not ended so long after the last request was due, is given up


@dataclass
class _Sent:
    index: int
    planned: Planned
    due_s: float
    answer: Answer


class Load:
    """Sends what is planned by one client."""

    def __init__(self, client: Client, target: Target, template: dict[str, object]) -> None:
        self._client, self._target, self._template = client, target, template
        self._sent: list[_Sent] = []
        self._start_s = 0.0

    async def run(
        self, shape: Shape, planned: Sequence[tuple[int, Planned]], start_s: float | None = None
    ) -> tuple[list[Sample], float]:
        """Run one window; return its samples and its length in seconds.

        `planned` has each request's number. `start_s` is a monotonic time to begin at; None: now.
        """
        self._sent = []
        raw = {index: self._target.request(self._body(one)) for index, one in planned}
        steady = [(index, one) for index, one in planned if one.group == STEADY]
        others = [(index, one) for index, one in planned if one.group != STEADY]
        with _no_collection():
            await self._warm(steady, raw)
            self._start_s = start_s if start_s is not None and start_s > now() else now()
            if shape.concurrency is None:
                await self._open_loop(others, raw, shape)
            else:
                await self._closed_loop(others, raw, shape)
            await asyncio.sleep(max(0.0, self._start_s + shape.duration_s - now()))
            took_s = now() - self._start_s
            for sent in self._sent:
                if sent.planned.group == STEADY:
                    self._client.cut_off(sent.answer)
        self._sent.sort(key=lambda sent: sent.index)
        return [_sample(shape, sent, self._start_s) for sent in self._sent], took_s

    def _body(self, planned: Planned) -> bytes:
        return msgspec.json.encode(self._template | {"prompt": planned.prompt, "max_tokens": planned.max_tokens})

    def _send(self, index: int, planned: Planned, raw: dict[int, bytes], due_s: float) -> Answer:
        answer = self._client.send(self._target, raw[index])
        self._sent.append(_Sent(index, planned, due_s, answer))
        return answer

    async def _warm(self, steady: Sequence[tuple[int, Planned]], raw: dict[int, bytes]) -> None:
        """Start the steady streams and return when all are past their start."""
        answers = [self._send(index, one, raw, now()) for index, one in steady]
        waits = [_future(answer, warm=True) for answer in answers]
        if waits:
            await asyncio.wait(waits, timeout=_WARM_S)
        failed = next((answer for answer in answers if answer.failure or answer.ttft_s is None), None)
        if failed is not None:
            for answer in answers:
                self._client.cut_off(answer)
            raise UpstreamError(f"A steady stream did not start: {failed.failure} {failed.detail}".strip())

    async def _open_loop(self, planned: Sequence[tuple[int, Planned]], raw: dict[int, bytes], shape: Shape) -> None:
        pump = _Pump(self, sorted(planned, key=lambda each: each[1].at_s), raw, self._start_s)
        await pump.finished
        await self._drain(shape.drain_s)

    async def _closed_loop(self, planned: Sequence[tuple[int, Planned]], raw: dict[int, bytes], shape: Shape) -> None:
        assert shape.concurrency is not None
        await asyncio.sleep(max(0.0, self._start_s - now()))
        left = iter(planned)
        async with asyncio.TaskGroup() as lanes:
            for _ in range(shape.concurrency):
                lanes.create_task(self._lane(left, raw, shape.drain_s))

    async def _lane(self, left: Iterator[tuple[int, Planned]], raw: dict[int, bytes], patience_s: float) -> None:
        for index, one in left:
            answer = self._send(index, one, raw, now())
            await asyncio.wait([_future(answer)], timeout=patience_s)
            self._give_up(answer, patience_s)

    async def _drain(self, patience_s: float) -> None:
        answers = [sent.answer for sent in self._sent if sent.planned.group != STEADY]
        waits = [_future(answer) for answer in answers if not answer.done]
        if waits:
            await asyncio.wait(waits, timeout=patience_s)
        for answer in answers:
            self._give_up(answer, patience_s)

    def _give_up(self, answer: Answer, patience_s: float) -> None:
        if not answer.done:
            answer.fail("stalled", f"it had not ended {patience_s:g} s later")
            self._client.cut_off(answer)


class _Pump:
    """Sends each request when it is due, by one timer for all."""

    def __init__(
        self, load: Load, planned: Sequence[tuple[int, Planned]], raw: dict[int, bytes], start_s: float
    ) -> None:
        self._load, self._planned, self._raw, self._start_s = load, planned, raw, start_s
        self._next = 0
        self._loop = asyncio.get_running_loop()
        self.finished: asyncio.Future[None] = self._loop.create_future()
        self._turn()

    def _turn(self) -> None:
        if self.finished.done():
            return
        while self._next < len(self._planned):
            index, one = self._planned[self._next]
            wait_s = self._start_s + one.at_s - now()
            if wait_s > _EARLY_S:
                self._loop.call_later(wait_s, self._turn)
                return
            self._load._send(index, one, self._raw, self._start_s + one.at_s)
            self._next += 1
        self.finished.set_result(None)


def _future(answer: Answer, *, warm: bool = False) -> asyncio.Future[None]:
    """Return a future that is done when `answer` is (or is past its start)."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def resolve() -> None:
        if not future.done():
            future.set_result(None)

    if answer.done:
        resolve()
    elif warm:
        answer.on_warm = resolve
    else:
        answer.on_done = resolve
    return future


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector out of the window: its pauses would look like the server's."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _sample(shape: Shape, sent: _Sent, start_s: float) -> Sample:
    answer = sent.answer
    usage, details = answer.usage, answer.usage and answer.usage.prompt_tokens_details
    decision = decided(answer.headers.get("x-tollbridge-decision"))
    return Sample(
        cell=shape.cell,
        block=shape.block,
        arm=shape.arm,
        index=sent.index,
        group=sent.planned.group,
        at_s=round(sent.due_s - start_s, 6),
        sent_s=round(answer.sent_s - start_s, 6),
        num_prompt_tokens=(usage.prompt_tokens if usage else 0) or sent.planned.num_prompt_tokens,
        max_tokens=sent.planned.max_tokens,
        ttft_s=None if answer.ttft_s is None else round(answer.ttft_s, 6),
        gaps_s=[round(gap, 6) for gap in answer.gaps_s],
        num_tokens=answer.num_tokens,
        num_merged=answer.num_merged,
        num_cached=details.cached_tokens if details else None,
        failure=answer.failure,
        detail=answer.detail,
        cut=answer.cut and not answer.failure,
        decision=decision.id if decision else "",
        choice=decision.choice if decision else "",
    )


class Told(msgspec.Struct, frozen=True):
    """What of a router's decision comes with the answer, as far as it is of use here."""

    id: str
    choice: str = ""


def decided(header: str | None) -> Told | None:
    """Return what the header x-tollbridge-decision says; None without one, or one that is not understood."""
    try:
        return msgspec.json.decode(header, type=Told) if header else None
    except msgspec.DecodeError:
        return None
