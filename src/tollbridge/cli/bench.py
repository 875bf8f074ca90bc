"""`tollbridge bench EXPERIMENT`: measurements that people can repeat, each one command."""

from __future__ import annotations

import asyncio
import json as jsonlib
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import uvloop
from cyclopts import App, Parameter
from rich.console import Console

from tollbridge.bench import local
from tollbridge.bench.arms import parse_arm
from tollbridge.bench.book import load as read_book
from tollbridge.bench.experiments import break_even as break_even_
from tollbridge.bench.experiments import chunked as chunked_
from tollbridge.bench.experiments import goodput as goodput_
from tollbridge.bench.experiments import interference as interference_
from tollbridge.bench.experiments import length_sweep as length_sweep_
from tollbridge.bench.experiments import load as load_
from tollbridge.bench.experiments import memory as memory_
from tollbridge.bench.experiments import prefix_grid as prefix_grid_
from tollbridge.bench.experiments import separation as separation_
from tollbridge.bench.experiments import trace as trace_
from tollbridge.bench.outcome import Experiment, write_outcome
from tollbridge.bench.records import Arm
from tollbridge.bench.run import measure
from tollbridge.bench.session import Options
from tollbridge.bench.vllm_worker import CPU_ARGS, find_vllm
from tollbridge.cli.display import Display, make_display
from tollbridge.cli.interrupts import Interrupts, run_interruptible
from tollbridge.cli.prepare import prepare_model
from tollbridge.engine.store import DEFAULT_MODEL, smollm2_folder
from tollbridge.errors import ConfigError
from tollbridge.report.text import show

app = App(name="bench", help="Measure servers, and compare ways to be served.")


@dataclass(frozen=True, kw_only=True)
class Common:
    """What every experiment takes."""

    arm: Annotated[
        list[str],
        Parameter(
            help="NAME=URL[,policy=split][,workers=URL+URL][,gpus=2][,model=NAME][,key=ENV]: a way to be served; the "
            "first is the baseline. Without any, workers are started here."
        ),
    ] = field(default_factory=list)
    model: Annotated[
        str, Parameter(help="Of the workers that are started here: smollm2, tiny, a folder, or a hub id.")
    ] = "smollm2"
    engine: Annotated[
        Literal["embedded", "vllm"],
        Parameter(help="Of the workers that are started here; TOLLBRIDGE_VLLM_PYTHON names vLLM's interpreter."),
    ] = "embedded"
    engine_args: Annotated[
        str,
        Parameter(
            allow_leading_hyphen=True,
            help="What vLLM gets, such as '--gpu-memory-utilization 0.4' for two servers on one GPU; on a CPU "
            f"'{CPU_ARGS}' by default.",
        ),
    ] = ""
    out: Annotated[
        Path | None,
        Parameter(help="Folder for records, result and report; one that holds a run cut off is gone on with."),
    ] = None
    seed: Annotated[int, Parameter(help="Prompts, arrivals and orders follow from it.")] = 1
    processes: Annotated[int | None, Parameter(help="Client processes; by default as many as keep up.")] = None
    stall: Annotated[float, Parameter(help="A request of which nothing comes for so many seconds has failed.")] = 60.0
    plain: Annotated[bool, Parameter(negative=(), help="Send nothing that only vLLM and our workers know.")] = False
    json: Annotated[bool, Parameter(negative=(), help="Print the result as one JSON document.")] = False


_EXPERIMENTS = {
    "interference": interference_,
    "length-sweep": length_sweep_,
    "load": load_,
    "separation": separation_,
    "memory": memory_,
    "goodput": goodput_,
    "chunked": chunked_,
    "prefix-grid": prefix_grid_,
    "break-even": break_even_,
    "trace": trace_,
}
_Common = Annotated[Common, Parameter(name="*")]


@app.command
def interference(
    *,
    common: _Common = Common(),
    settings: Annotated[interference_.Settings | None, Parameter(name="*")] = None,
) -> int:
    """Gaps between tokens of running streams while long prompts arrive: flat against cheap. Under three minutes."""
    return _start(Experiment("interference", interference_), common, settings or interference_.Settings())


@app.command(name="length-sweep")
def length_sweep(
    *,
    common: _Common = Common(),
    settings: Annotated[length_sweep_.Settings | None, Parameter(name="*")] = None,
) -> int:
    """One request at a time, short prompts to long: what a split adds a token, and the bandwidth that it reached."""
    return _start(Experiment("length-sweep", length_sweep_), common, settings or length_sweep_.Settings())


@app.command
def load(*, common: _Common = Common(), settings: Annotated[load_.Settings | None, Parameter(name="*")] = None) -> int:
    """Plain load, open loop (even, Poisson, gamma) or closed loop, on any servers."""
    return _start(Experiment("load", load_), common, settings or load_.Settings())


@app.command
def separation(
    *, common: _Common = Common(), settings: Annotated[separation_.Settings | None, Parameter(name="*")] = None
) -> int:
    """Who generated how many tokens, by the workers' own counters: was it really split?"""
    return _start(Experiment("separation", separation_), common, settings or separation_.Settings())


@app.command
def memory(
    *, common: _Common = Common(), settings: Annotated[memory_.Settings | None, Parameter(name="*")] = None
) -> int:
    """Resident memory of the workers over time while 1, 4 and 8 requests are split at once."""
    return _start(Experiment("memory", memory_), common, settings or memory_.Settings())


@app.command
def goodput(
    *, common: _Common = Common(), settings: Annotated[goodput_.Settings | None, Parameter(name="*")] = None
) -> int:
    """The highest rate at which requests meet their SLO, by bisection with its bracket, for each policy."""
    return _start(Experiment("goodput", goodput_), common, settings or goodput_.Settings())


@app.command
def chunked(
    *, common: _Common = Common(), settings: Annotated[chunked_.Settings | None, Parameter(name="*")] = None
) -> int:
    """Chunk size against interference: the alternative to a split."""
    return _start(Experiment("chunked", chunked_), common, settings or chunked_.Settings())


@app.command(name="prefix-grid")
def prefix_grid(
    *, common: _Common = Common(), settings: Annotated[prefix_grid_.Settings | None, Parameter(name="*")] = None
) -> int:
    """Shared prefixes by kinds and concurrency: TTFT, requests per second, cache hits."""
    return _start(Experiment("prefix-grid", prefix_grid_), common, settings or prefix_grid_.Settings())


@app.command(name="break-even")
def break_even(
    *, common: _Common = Common(), settings: Annotated[break_even_.Settings | None, Parameter(name="*")] = None
) -> int:
    """From which link on fetching KV is quicker than computing it, beside the plan (root: shaped link)."""
    return _start(Experiment("break-even", break_even_), common, settings or break_even_.Settings())


@app.command
def trace(
    *, common: _Common = Common(), settings: Annotated[trace_.Settings | None, Parameter(name="*")] = None
) -> int:
    """Replay a recorded trace (Azure, Mooncake), scaled as stated."""
    return _start(Experiment("trace", trace_), common, settings or trace_.Settings())


@app.command
def report(out: Annotated[Path, Parameter(help="The folder of a run, finished or cut off.")]) -> int:
    """Make the report of a run again from its records."""
    book = read_book(out / "records.jsonl")
    module = _EXPERIMENTS.get(book.head.experiment)
    if module is None or not book.windows:
        raise ConfigError(f"{out} has no complete window of an experiment that this version knows.")
    known = {field.name for field in fields(module.Settings)}
    settings = module.Settings(**{key: value for key, value in book.head.parameters.items() if key in known})
    document, _ = write_outcome(Experiment(book.head.experiment, module), book, settings, out)
    show(document, Console(width=None if sys.stdout.isatty() else 120))
    return 0


def _start(experiment: Experiment, common: Common, settings: Any) -> int:
    arms = [parse_arm(text) for text in common.arm]
    out = common.out or Path("bench-results") / f"{experiment.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    work = partial(_run, experiment, common, settings, arms, out)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run_interruptible(work))


async def _run(
    experiment: Experiment, common: Common, settings: Any, arms: Sequence[Arm], out: Path, interrupts: Interrupts
) -> int:
    options = Options(processes=common.processes, stall_s=common.stall, extensions=not common.plain)
    async with AsyncExitStack() as stack:
        display = stack.enter_context(make_display())
        if not arms:
            arms = await _start_local(experiment, common, settings, options, display, stack)
        document, result = await measure(
            experiment, arms, settings, out, seed=common.seed, options=options, tell=display.note,
            about={"model": common.model, "engine": options.engine} if options.is_local else {},
        )  # fmt: skip
    if common.json:
        print(jsonlib.dumps(result))
        return 0
    show(document, Console(width=None if sys.stdout.isatty() else 120))
    print(f"\nReport: {out / 'report.html'}   figures: {out / 'result.json'}   raw: {out / 'records.jsonl'}")
    return 0


async def _start_local(
    experiment: Experiment, common: Common, settings: Any, options: Options, display: Display, stack: AsyncExitStack
) -> list[Arm]:
    vllm = await asyncio.to_thread(find_vllm, common.engine_args, os.environ) if common.engine == "vllm" else None
    if common.engine_args and vllm is None:
        raise ConfigError("--engine-args are vLLM's: give --engine vllm as well.", param="engine_args")
    model = await prepare_model(common.model, display)
    if vllm is not None and model == DEFAULT_MODEL:
        model = str(smollm2_folder())
    given = local.Local(model=model, vllm=vllm)
    what = f"workers of {vllm.about}, which takes a minute or more" if vllm else "embedded workers"
    display.begin("workers", f"starting {what}")
    own = getattr(experiment.module, "start", None)  # an experiment that needs more than a pair and its router
    starting = own(given, settings) if own else local.start(given, experiment.module.ARMS)
    found = await stack.enter_async_context(starting)
    display.end("workers", "serving")
    options.is_local, options.pids, options.names = True, found.pids, found.names
    options.engine = vllm.about if vllm else common.engine
    options.link = found.link
    return list(found.arms)
