"""How fast is the engine behind a URL? Prefill by length and context, decode step by batch; asked from outside.

Prompts are random token ids, so no prefix cache answers; those with a context share a prefix on purpose, and count as
having the context that the server says it found. Prefill is taken from the server's own metrics where it has them,
which leaves HTTP and the queue out; otherwise it is TTFT less the fixed cost, which is the TTFT of one token less a
decode step (a pass over one token costs the same whatever it is called). Metrics are read before and after each
measurement: when they count requests that are not ours, or begin again, nothing of it can be used, and the probe ends
and says so.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import TypeVar

from tollbridge.clock import Clock
from tollbridge.config.calibration import EngineCalibration
from tollbridge.cost.engine import DEFAULT_BUDGET
from tollbridge.errors import RequestError, UnavailableError, UnsupportedError
from tollbridge.probe.fit import DecodeSample, PrefillSample, fit_decode, fit_prefill
from tollbridge.probe.scrape import Reading
from tollbridge.probe.server import Served, Server, Timing
from tollbridge.probe.survey import survey

T = TypeVar("T")
Tell = Callable[[str, float], None]  # what is being measured, and how much of the time is gone (0 to 1)

# The short ones are multiples of no usual budget: where all lengths are, chunks and tokens cannot be told apart.
_LENGTHS = (24, 48, 96, 192, 384, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768)
_CONTEXTS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_VOCABULARIES = (30_000, 8_000, 2_000, 400)  # ids to draw from; the server refuses what it does not have
_FIRST_ID = 16  # below are special tokens
_DECODE_PROMPT = 48  # tokens
_MAX_STEPS = 128  # of a batch, beyond those that it takes until all of it decodes
_MIN_STEPS = 12
_STEPS_S = 2.0  # so long a batch decodes, at most
_LEAST_STEP_S = 1e-6
_SETTLE_S = 5.0  # a server may count a request a moment after its last byte


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much to measure. `budget_s` bounds all of it, give or take one measurement."""

    budget_s: float = 240.0
    repeats: int = 3
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    max_length: int = 32_768


FULL = Effort()
QUICK = Effort(budget_s=45.0, repeats=2, batches=(1, 4, 16), max_length=8192)
_DECODE_SHARE, _LENGTH_SHARE, _CONTEXT_SHARE = 0.3, 0.42, 0.2  # of the budget; the rest is warm-up and slack


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """What was found, and what a reader should know about it."""

    served: Served
    calibration: EngineCalibration
    fixed_s: float | None  # of a request, beyond its prefill; None: not needed
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class _Prefilled:
    tokens: int  # computed
    context: int | None  # cached; None: the server does not say
    seconds: float
    source: str


class EngineProbe:
    """One probe of one server. `run` once."""

    def __init__(
        self,
        server: Server,
        served: Served,
        *,
        effort: Effort,
        clock: Clock,
        rng: random.Random,
        tell: Tell,
        settle_s: float = _SETTLE_S,
    ) -> None:
        self._server, self._served, self._effort, self._settle_s = server, served, effort, settle_s
        self._clock, self._rng, self._tell = clock, rng, tell
        self._begun_s = clock.monotonic()
        self._vocabulary = _VOCABULARIES[0]
        self._before: Reading | None = None
        self._fixed_s: float | None = None
        self._notes: list[str] = []

    async def run(self, budget: int | None = None) -> EngineReport:
        """Measure and fit; `budget` is the engine's token budget of a step, where it does not say it itself."""
        chunk = self._served.max_num_batched_tokens or budget or DEFAULT_BUDGET
        self._before = await self._quiet()
        await self._warm_up()
        batches = await self._batches()
        if self._before is None or self._before.prefill_s is None:
            self._fixed_s = await self._fixed(batches[0])
        samples = await self._lengths()
        samples += await self._contexts()
        return EngineReport(
            served=self._served,
            calibration=EngineCalibration(
                prefill=fit_prefill(samples, chunk, floor_s=batches[0].seconds),
                decode=fit_decode(batches),
                max_num_batched_tokens=chunk,
                samples=[*samples, *batches],
            ),
            fixed_s=self._fixed_s,
            notes=self._notes,
        )

    # ── what is measured ──

    async def _warm_up(self) -> None:
        """Run every path once; find a range of token ids that the server has."""
        self._say("warming up")
        for vocabulary in _VOCABULARIES:
            self._vocabulary = vocabulary
            try:
                await self._measure([self._ids(_DECODE_PROMPT)], 2)
                break
            except RequestError as error:
                if type(error) is not RequestError:
                    raise
                if vocabulary == _VOCABULARIES[-1]:
                    raise UnsupportedError(f"The server takes no prompt of token ids: {error.message}") from None
        await self._measure([self._ids(_DECODE_PROMPT) for _ in range(2)], _MIN_STEPS)

    async def _batches(self) -> list[DecodeSample]:
        effort, step_s = self._effort, 0.02
        steps_s = min(_STEPS_S, _DECODE_SHARE * effort.budget_s / (effort.repeats * len(effort.batches)))

        async def measure(batch: int) -> float | None:
            nonlocal step_s
            self._say(f"decode, {batch} streams")
            steps = batch + max(_MIN_STEPS, min(_MAX_STEPS, int(steps_s / step_s)))
            steps = min(steps, self._served.max_model_len - _DECODE_PROMPT - 1)
            timings, _ = await self._measure([self._ids(_DECODE_PROMPT) for _ in range(batch)], steps)
            found = step_of(timings)
            step_s = found or step_s
            return found

        results = await self._survey(effort.batches, measure, _DECODE_SHARE)
        samples = []
        for batch, found in results.items():
            seconds = [value for value in found if value is not None]
            if seconds:
                low, high = min(seconds), max(seconds)
                middle = median_low(seconds)
                samples.append(DecodeSample(batch=batch, seconds=middle, low_s=low, high_s=high, repeats=len(seconds)))
            else:
                self._notes.append(f"The server never ran {batch} streams at once, so their step is not known.")
        if len(samples) < 2:
            raise UnsupportedError(
                "The streams could not be timed: the server sends many tokens at once, or runs one request at a time."
            )
        return samples

    async def _fixed(self, alone: DecodeSample) -> float:
        self._say("fixed cost of a request")
        found = [(await self._measure([self._ids(1)], 1))[0][0].ttft_s for _ in range(5)]
        return max(0.0, median(found) - alone.seconds)

    async def _lengths(self) -> list[PrefillSample]:
        async def measure(tokens: int) -> _Prefilled:
            self._say(f"prefill, {tokens:,} tokens")
            return await self._prefill(self._ids(tokens))

        longest = min(self._served.max_model_len - 2, self._effort.max_length)
        lengths = [length for length in _LENGTHS if length <= longest]
        if len(lengths) < 2:
            raise UnsupportedError(f"A model of {self._served.max_model_len} positions is too short to be probed.")
        results = await self._survey(lengths, measure, _LENGTH_SHARE, at_least=3)
        if any((found[0].context or 0) > 0.1 * tokens for tokens, found in results.items()):
            self._notes.append("The server found random prompts in its cache; what it computed was counted.")
        return [_sample(found) for found in results.values()]

    async def _contexts(self) -> list[PrefillSample]:
        """Prefill after a shared prefix, where the server says how much of it it had."""
        new = min(256, self._served.max_model_len // 4)
        prefixes: dict[int, list[int]] = {}

        async def measure(context: int) -> _Prefilled:
            self._say(f"prefill after {context:,} tokens of context")
            if context not in prefixes:
                prefixes[context] = self._ids(context)
                await self._measure([prefixes[context]], 1)
            return await self._prefill(prefixes[context] + self._ids(new))

        longest = min(self._served.max_model_len - 2 - new, self._effort.max_length)
        contexts = [context for context in _CONTEXTS if context <= longest]
        if not contexts:
            return []
        first = await measure(contexts[0])
        if first.context is None:
            self._notes.append("The server does not say what its prefix cache had, so no context was measured.")
            return []
        if first.context < contexts[0] // 2:
            self._notes.append("The server has no prefix cache, so no context was measured.")
            return []
        results = await self._survey(contexts, measure, _CONTEXT_SHARE, at_least=1)
        return [_sample(found) for found in results.values()]

    # ── how ──

    async def _prefill(self, prompt: list[int]) -> _Prefilled:
        before = self._before
        (timing,), after = await self._measure([prompt], 1)
        seconds, source = timing.ttft_s - (self._fixed_s or 0.0), "ttft"
        cached = timing.cached_tokens
        if before is not None and after is not None:
            if after.prefill_s is not None and after.num_prefills - before.num_prefills == 1:
                seconds, source = after.prefill_s - (before.prefill_s or 0.0), "metrics"
            if cached is None and after.cached_tokens is not None:
                cached = int(after.cached_tokens - (before.cached_tokens or 0.0))
        if cached is not None and not 0 <= cached < len(prompt):
            raise UnsupportedError(
                f"{self._server.url} says that {cached} of {len(prompt)} prompt tokens were cached, and the last one "
                "never is: its figures cannot be used."
            )
        return _Prefilled(tokens=len(prompt) - (cached or 0), context=cached, seconds=max(seconds, 1e-6), source=source)

    async def _measure(self, prompts: Sequence[list[int]], max_tokens: int) -> tuple[list[Timing], Reading | None]:
        """Run requests at once and alone; UnavailableError when they were not alone."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._server.stream(self._served.model, p, max_tokens)) for p in prompts]
        except ExceptionGroup as several:
            raise several.exceptions[0] from None
        self._before = await self._settled(self._before, len(prompts))
        return [task.result() for task in tasks], self._before

    async def _settled(self, before: Reading | None, num_ours: int) -> Reading | None:
        """Return the metrics once they count our requests; UnavailableError when they count others too."""
        if before is None:
            return None
        deadline_s = self._clock.monotonic() + self._settle_s
        while True:
            now = await self._server.maybe_reading()
            if now is None or now.restarted_since(before):
                raise UnavailableError(f"The server at {self._server.url} restarted during the probe: probe it again.")
            ended = num_ours if now.ended is None else int(now.ended - (before.ended or 0.0))
            if ended > num_ours:
                raise self._busy(f"{ended - num_ours} requests that are not ours ended meanwhile")
            if ended == num_ours and not now.open:
                return now
            if self._clock.monotonic() > deadline_s:
                if now.open:
                    raise self._busy(f"{now.open:g} requests that are not ours are open")
                return now
            await asyncio.sleep(0.02)

    async def _quiet(self) -> Reading | None:
        """Return the first reading; UnavailableError when somebody else's requests run."""
        reading = await self._server.maybe_reading()
        if reading is None:
            self._notes.append("The server has no metrics: whether it served others meanwhile is not known.")
            return None
        if reading.is_router:
            raise UnsupportedError(f"{self._server.url} is a Tollbridge router: give the address of one worker.")
        if reading.open:
            raise self._busy(f"{reading.open:g} requests that are not ours are open")
        return reading

    def _busy(self, clause: str) -> UnavailableError:
        return UnavailableError(
            f"The server at {self._server.url} is serving somebody else ({clause}): probe it while it is idle."
        )

    async def _survey(
        self, cases: Sequence[int], measure: Callable[[int], Awaitable[T]], share: float, at_least: int = 2
    ) -> dict[int, list[T]]:
        return await survey(
            cases,
            measure,
            repeats=self._effort.repeats,
            share_s=share * self._effort.budget_s,
            clock=self._clock,
            at_least=at_least,
        )

    def _ids(self, count: int) -> list[int]:
        return self._rng.choices(range(_FIRST_ID, self._vocabulary), k=count)

    def _say(self, what: str) -> None:
        self._tell(what, min(1.0, (self._clock.monotonic() - self._begun_s) / self._effort.budget_s))


def step_of(timings: Sequence[Timing]) -> float | None:
    """Return the step of streams while all of them decode; None when they never did long enough to tell."""
    begin_s = max(timing.arrivals[0][0] for timing in timings)
    end_s = min(timing.arrivals[-1][0] for timing in timings)
    found = []
    for timing in timings:
        inside = [(when_s, tokens) for when_s, tokens in timing.arrivals if begin_s <= when_s <= end_s]
        if len(inside) >= 3:
            (first_s, first), (last_s, last) = inside[0], inside[-1]
            found.append((last_s - first_s) / (last - first))
    step_s = median(found) if len(found) == len(timings) else 0.0
    return step_s if step_s > _LEAST_STEP_S else None  # or all came in one piece: something on the way collects it


def _sample(found: Sequence[_Prefilled]) -> PrefillSample:
    seconds = [one.seconds for one in found]
    middle = median_low(seconds)
    chosen = found[seconds.index(middle)]
    return PrefillSample(
        tokens=chosen.tokens,
        context=chosen.context or 0,
        seconds=middle,
        low_s=min(seconds),
        high_s=max(seconds),
        repeats=len(seconds),
        source=chosen.source,
    )
