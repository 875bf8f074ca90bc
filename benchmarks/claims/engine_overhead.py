"""What does the embedded engine cost beside its model? The share of a decode step that is not the forward pass.

SmolLM2 on the CPU with 16 sequences that decode; the clock runs from the begin of a step to when all sinks have been
called, and the model's share is the time in transformers' module, attention and KV cache included. So what counts as
overhead is scheduling, laying out the step, sampling, detokenising, stop strings and handing over. Four mixes: greedy;
by chance over the whole vocabulary; with top-p; with everything (penalties, min-p, top-k, top-p, bias, logprobs).
The bound holds for the first three; the last is stated.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.support.result import ClaimResult, Table, unavailable
from tollbridge.config.cluster import EngineConfig
from tollbridge.errors import TollbridgeError

DESCRIPTION = "The embedded engine's step overhead outside the model is under 10 % with 16 running sequences"

MAX_SHARE = 0.10
NUM_SEQUENCES = 16
PROMPT_TOKENS = 64
WARM_UP_STEPS = 5

MIXES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 1.0},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "everything": {
        "temperature": 0.8,
        "top_p": 0.95,
        "top_k": 100,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logit_bias": ((100, 1.0),),
        "logprobs": 2,
    },
}
BOUNDED = ("greedy", "random", "top_p")


@dataclass
class Times:
    """Seconds of each pure decode step of all sequences."""

    step_s: list[float] = field(default_factory=list)
    model_s: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Overhead over all steps, the first ones left out; by sums, so that no step's noise counts twice."""
        steps, models = self.step_s[WARM_UP_STEPS:], self.model_s[WARM_UP_STEPS:]
        return 1 - sum(models) / sum(steps)

    @property
    def overhead_ms(self) -> float:
        each = [step - model for step, model in zip(self.step_s, self.model_s, strict=True)][WARM_UP_STEPS:]
        return 1e3 * statistics.median(each)

    @property
    def model_ms(self) -> float:
        return 1e3 * statistics.median(self.model_s[WARM_UP_STEPS:])


def run(quick: bool) -> ClaimResult:
    """Measure every mix on one engine."""
    from tollbridge.engine.build import build_engine

    num_tokens = 40 if quick else 200
    try:
        engine = build_engine("smollm2", EngineConfig(kv_cache_mib=256))
    except TollbridgeError as error:
        return unavailable(error.message)
    try:
        watch = _Watch(engine)
        found = {mix: watch.measure(more, num_tokens) for mix, more in MIXES.items()}
    finally:
        engine.shutdown()
    shares = {f"{mix}_share": round(times.share, 4) for mix, times in found.items()}
    overheads = {f"{mix}_overhead_ms": round(times.overhead_ms, 3) for mix, times in found.items()}
    return ClaimResult(
        holds=all(shares[f"{mix}_share"] < MAX_SHARE for mix in BOUNDED),
        figures={**shares, **overheads, "model_ms": round(found["greedy"].model_ms, 2)},
        bounds={f"{mix}_share": f"< {MAX_SHARE}" for mix in BOUNDED},
        conditions={
            "model": "smollm2",
            "dtype": engine.info.dtype,
            "sequences": NUM_SEQUENCES,
            "prompt_tokens": PROMPT_TOKENS,
            "tokens": num_tokens,
        },
        table=Table(
            title=f"{NUM_SEQUENCES} sequences decode: a step, median",
            columns=["mix", "model ms", "overhead ms", "share of the step"],
            rows=[
                [mix, f"{times.model_ms:.2f}", f"{times.overhead_ms:.2f}", f"{times.share:.1%}"]
                for mix, times in found.items()
            ],
        ),
    )


class _Watch:
    """Times the steps of an engine from inside."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._times = Times()
        self._model_s = 0.0
        self._counts = False  # the step is a decode of all sequences
        self._begun_s = 0.0
        loop, runner = engine._loop, engine._loop._runner
        loop.step = self._stepping(loop.step)
        runner.run = self._running(runner.run)
        runner._model.module.forward = self._computing(runner._model.module.forward)
        engine._deliver = self._delivering(engine._deliver)

    def measure(self, more: dict[str, Any], num_tokens: int) -> Times:
        """Return the times of a run with sampling parameters `more`."""
        from tollbridge.engine.base import EngineRequest, SamplingParams, StepOutput

        self._times = Times()
        rng, left, done = random.Random(1), [NUM_SEQUENCES], threading.Event()

        def sink(output: StepOutput) -> None:
            left[0] -= output.finish_reason is not None
            if not left[0]:
                done.set()

        for index in range(NUM_SEQUENCES):
            sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=index, stop=("\x00never",), **more)
            prompt = tuple(rng.randrange(100, 40_000) for _ in range(PROMPT_TOKENS))
            self._engine.submit(
                EngineRequest(request_id=str(index), prompt_token_ids=prompt, sampling=sampling, sink=sink)
            )
        done.wait()
        return self._times

    def _stepping(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def timed(commands: Any) -> Any:
            self._begun_s, self._model_s, self._counts = time.perf_counter(), 0.0, False
            return step(commands)

        return timed

    def _running(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(plan: Any, on_layer: Any) -> Any:
            self._counts = plan.num_tokens == len(plan.chunks) == NUM_SEQUENCES
            return run(plan, on_layer)

        return timed

    def _computing(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun_s = time.perf_counter()
            try:
                return forward(*args, **kwargs)
            finally:
                self._model_s += time.perf_counter() - begun_s

        return timed

    def _delivering(self, deliver: Callable[..., Any]) -> Callable[..., Any]:
        def timed(deliveries: Any) -> None:
            deliver(deliveries)
            if self._counts:
                self._times.step_s.append(time.perf_counter() - self._begun_s)
                self._times.model_s.append(self._model_s)

        return timed
