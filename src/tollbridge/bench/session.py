"""A run in progress: windows by arm and block, written down as they end, skipped where they are written already."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType

import aiohttp
import msgspec

from tollbridge.bench.book import Book
from tollbridge.bench.client import now
from tollbridge.bench.figures import Slo, remarks
from tollbridge.bench.netns import Link
from tollbridge.bench.records import Arm, Plan, Planned, Sample, Window
from tollbridge.bench.schedule import VOCABULARIES, order
from tollbridge.bench.shard import Task, processes_for, run_here, run_sharded
from tollbridge.bench.watch import Watch
from tollbridge.errors import UpstreamError
from tollbridge.wire.decision import DecisionRecord

POLICY_HEADER = "x-tollbridge-policy"
UNBOUNDED = 1 << 20
_UNKNOWN_IDS = (" http, 400", "out of vocabulary")  # how servers refuse them; vLLM does so inside a stream
_MAX_LOOKED_UP = 200  # decisions of a window: each is a request to the router
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one window sends."""

    requests: Sequence[Planned]
    concurrency: int | None = None  # closed loop; None: open loop
    duration_s: float = 0.0
    drain_s: float = 60.0


@dataclass(kw_only=True)
class Options:
    """How requests are made, the same for all experiments."""

    path: str = "/v1/completions"
    extensions: bool = True  # ignore_eos and running usage, which vLLM and our workers know
    processes: int | None = None  # None: as many as keep up
    stall_s: float = 60.0
    memory: bool = False
    link: Link | None = None  # between the workers' hosts, where it can be shaped
    is_local: bool = False  # the workers were started here
    engine: str = ""  # of such workers, for the conditions
    pids: Mapping[str, int] = field(default_factory=dict)  # by worker URL
    names: Mapping[str, str] = field(default_factory=dict)  # of workers, by URL


class Budget:
    """Whether there is time for another block: the next one takes as long as the longest so far."""

    def __init__(self, seconds: float, min_blocks: int = 3) -> None:
        self._seconds, self._min_blocks = seconds, min_blocks
        self._began_s = self._last_s = now()
        self._longest_s = 0.0

    def allows(self, block: int) -> bool:
        """Call it before each block, with its number."""
        self._longest_s = max(self._longest_s, now() - self._last_s)
        self._last_s = now()
        return block < self._min_blocks or self._last_s - self._began_s + self._longest_s <= self._seconds


class Session:
    """Runs windows. Use it inside `async with`."""

    def __init__(self, book: Book, arms: Sequence[Arm], options: Options, tell: Tell) -> None:
        self.book = book
        self.arms = {arm.name: arm for arm in arms}
        self.options = options
        self.tell = tell
        self._exit = AsyncExitStack()
        self.vocabulary = VOCABULARIES[0]
        self.max_model_len = UNBOUNDED  # tokens of the shortest context of all arms
        self._models: dict[str, str | None] = {}

    async def __aenter__(self) -> Session:
        timeout = aiohttp.ClientTimeout(total=30)
        self.http = await self._exit.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        self._watch = Watch(self.http, self.options.pids)
        self._exit.push_async_callback(self._watch.stop)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exit.aclose()

    @property
    def seed(self) -> int:
        return self.book.head.seed

    async def settle(self) -> None:
        """Find out which token ids the servers know; UpstreamError when they do not serve."""
        for vocabulary in VOCABULARIES:
            self.vocabulary = vocabulary
            prompt = Planned(at_s=0.0, prompt=[vocabulary[1] - 1] * 8, max_tokens=2)
            try:
                await asyncio.gather(*(self.ask(arm, [prompt]) for arm in self.arms))
                return
            except UpstreamError as error:
                if not any(mark in error.message for mark in _UNKNOWN_IDS) or vocabulary is VOCABULARIES[-1]:
                    raise

    async def plan(self, measure: Callable[[], object]) -> Mapping[str, float]:
        """Return what was measured first, now or before the run was cut off."""
        if self.book.plan is None:
            values = measure()
            if asyncio.iscoroutine(values):
                values = await values
            self.book.keep(Plan(values=msgspec.convert(values, dict[str, float])))
        assert self.book.plan is not None
        return self.book.plan.values

    async def block(
        self, cell: str, block: int, make: Callable[[str], Traffic], arms: Sequence[str] | None = None
    ) -> None:
        """Run every arm once, in an order of the block's own; `make` gives an arm its traffic."""
        for name in order(list(arms or self.arms), block, self.seed):
            if not self.book.has(cell, block, name):
                await self.window(cell, block, name, make(name))

    async def window(self, cell: str, block: int, arm: str, traffic: Traffic) -> tuple[list[Sample], Window]:
        """Run one window and write it down."""
        chosen = self.arms[arm]
        task = await self._task(cell, block, chosen, traffic)
        await self._watch.begin(chosen.workers, memory=self.options.memory)
        try:
            samples, took_s = await self._send(task, traffic)
        finally:
            await self._watch.stop()
        counters, memory, energy_j = await self._watch.end(self.options.names)
        samples = await self._looked_up(chosen, samples)
        window = Window(
            cell=cell, block=block, arm=arm, duration_s=took_s, num_requests=len(samples), memory=memory,
            num_workers=chosen.num_workers, counters=counters, energy_j=energy_j,
            offered_per_s=None if traffic.concurrency or not took_s else len(traffic.requests) / took_s,
        )  # fmt: skip
        self.book.add(samples, window)
        self.tell(_line(window, samples))
        return samples, window

    async def ask(self, arm: str, num: Sequence[Planned], *, concurrency: int = 1) -> list[Sample]:
        """Send requests outside of the record: to warm up, to calibrate. UpstreamError when one fails."""
        task = await self._task("", 0, self.arms[arm], Traffic(requests=num, concurrency=concurrency))
        samples, _ = await run_here(task)
        failed = next((sample for sample in samples if not sample.ok), None)
        if failed is not None:
            raise UpstreamError(f"Arm {arm} at {self.arms[arm].url} does not serve: {failed.failure}, {failed.detail}.")
        return samples

    async def _send(self, task: Task, traffic: Traffic) -> tuple[list[Sample], float]:
        asked = self.options.processes
        if asked is None:
            asked = 1 if traffic.concurrency else processes_for(traffic.requests, traffic.duration_s)
        return await (run_sharded(task, asked) if asked > 1 else run_here(task))

    async def _task(self, cell: str, block: int, arm: Arm, traffic: Traffic) -> Task:
        return Task(
            url=arm.url, path=self.options.path, headers=headers_of(arm), template=await self._template(arm),
            cell=cell, block=block, arm=arm.name, duration_s=traffic.duration_s, concurrency=traffic.concurrency,
            drain_s=traffic.drain_s, stall_s=self.options.stall_s, start_s=0.0,
            planned=list(enumerate(traffic.requests)),
        )  # fmt: skip

    async def _template(self, arm: Arm) -> dict[str, object]:
        template: dict[str, object] = {"stream": True, "temperature": 0, "stream_options": {"include_usage": True}}
        if self.options.extensions:
            template |= {
                "ignore_eos": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
        model = await self._model(arm)
        return template | ({"model": model} if model else {})

    async def _model(self, arm: Arm) -> str | None:
        """Return the model to name: the arm's, or the first that the server lists."""
        if arm.name not in self._models:
            listed = await self._listed(arm)
            self._models[arm.name] = arm.model or listed
        return self._models[arm.name]

    async def _listed(self, arm: Arm) -> str | None:
        try:
            async with self.http.get(arm.url + "/v1/models", headers=headers_of(arm)) as response:
                card = (await response.json(content_type=None))["data"][0]
                self.max_model_len = min(self.max_model_len, card.get("max_model_len") or UNBOUNDED)
                return str(card["id"])
        except aiohttp.ClientConnectorError as error:
            raise UpstreamError(f"Arm {arm.name} at {arm.url} cannot be reached: {error.os_error}.") from None
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError, AttributeError):
            return None  # a server that lists none may not need the name

    async def _looked_up(self, arm: Arm, samples: list[Sample]) -> list[Sample]:
        """Add what the router knows of each split: KV on the wire, the wait for a place."""
        wanted = [at for at, sample in enumerate(samples) if sample.decision and not sample.cut][:_MAX_LOOKED_UP]
        for at in wanted:
            record = await self._record(arm, samples[at].decision)
            report = record.happened.decode_report if record else None
            if record is None:
                continue
            transfer = report.transfer if report else None
            samples[at] = msgspec.structs.replace(
                samples[at],
                queue_s=record.happened.queue_s,
                wire_bytes=transfer.payload_bytes if transfer else 0,
                wire_s=transfer.wire_s if transfer else 0.0,
            )
        return samples

    async def _record(self, arm: Arm, decision: str) -> DecisionRecord | None:
        try:
            async with self.http.get(f"{arm.url}/decisions/{decision}", headers=headers_of(arm)) as response:
                return msgspec.json.decode(await response.read(), type=DecisionRecord)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
            return None


def headers_of(arm: Arm) -> dict[str, str]:
    """Return the headers of an arm's requests."""
    headers = {POLICY_HEADER: arm.policy} if arm.policy else {}
    key = os.environ.get(arm.api_key_env or "", "")
    return headers | ({"Authorization": f"Bearer {key}"} if key else {})


def _line(window: Window, samples: Sequence[Sample]) -> str:
    failed = sum(1 for sample in samples if sample.failure)
    told = f", {failed} FAILED" if failed else ""
    late = any("LAGGED" in remark for remark in remarks(samples))
    return (
        f"{window.cell} block {window.block + 1}, {window.arm}: {len(samples)} requests in "
        f"{window.duration_s:.1f} s{told}{', CLIENT LAGGED' if late else ''}"
    )


SLO_PRESETS = {
    # MLPerf Inference v5.1, Llama-3.1-8B server and interactive; Llama-2-70B server and interactive
    "server": Slo(ttft_s=2.0, tpot_s=0.1),
    "interactive": Slo(ttft_s=0.5, tpot_s=0.03),
    "server-70b": Slo(ttft_s=2.0, tpot_s=0.2),
    "interactive-70b": Slo(ttft_s=0.45, tpot_s=0.04),
}
