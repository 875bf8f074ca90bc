"""`tollbridge bench EXPERIMENT`: measurements that people can repeat, each one command."""

from __future__ import annotations

import asyncio
import json as jsonlib
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import uvloop
from cyclopts import App, Parameter
from rich.console import Console

from tollbridge.bench import local
from tollbridge.bench.arms import parse_arm
from tollbridge.bench.book import Book
from tollbridge.bench.experiments import interference as interference_
from tollbridge.bench.machine import machine
from tollbridge.bench.outcome import Experiment, write_outcome
from tollbridge.bench.records import Arm, Head
from tollbridge.bench.session import Options, Session
from tollbridge.cli.display import Display, make_display
from tollbridge.cli.interrupts import Interrupts, run_interruptible
from tollbridge.cli.prepare import prepare_model
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
            "first is the baseline. Without any, embedded workers are started here."
        ),
    ] = field(default_factory=list)
    model: Annotated[str, Parameter(help="Of the embedded workers: smollm2, tiny, a folder, or a hub id.")] = "smollm2"
    out: Annotated[
        Path | None,
        Parameter(help="Folder for records, result and report; one that holds a run cut off is gone on with."),
    ] = None
    seed: Annotated[int, Parameter(help="Prompts, arrivals and orders follow from it.")] = 1
    processes: Annotated[int | None, Parameter(help="Client processes; by default as many as keep up.")] = None
    stall: Annotated[float, Parameter(help="A request of which nothing comes for so many seconds has failed.")] = 60.0
    plain: Annotated[bool, Parameter(negative=(), help="Send nothing that only vLLM and our workers know.")] = False
    json: Annotated[bool, Parameter(negative=(), help="Print the result as one JSON document.")] = False


_Common = Annotated[Common, Parameter(name="*")]


@app.command
def interference(
    *,
    common: _Common = Common(),
    settings: Annotated[interference_.Settings | None, Parameter(name="*")] = None,
) -> int:
    """Gaps between tokens of running streams while long prompts arrive: flat against cheap. Under three minutes."""
    return _start(Experiment("interference", interference_), common, settings or interference_.Settings())


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
            arms, options = await _start_local(experiment, common, options, display, stack)
        if len({arm.name for arm in arms}) < len(arms):
            raise ConfigError("Two arms have one name.")
        head = Head(
            experiment=experiment.name, parameters=asdict(settings), arms=[arm.name for arm in arms], seed=common.seed,
            conditions={**machine(), "model": common.model, "titles": {arm.name: arm.label for arm in arms}},
        )  # fmt: skip
        book = Book(out / "records.jsonl", head)
        session = await stack.enter_async_context(Session(book, arms, options, display.note))
        await session.settle()
        await experiment.module.run(session, settings)
    document, result = write_outcome(experiment, book, settings, out)
    if common.json:
        print(jsonlib.dumps(result))
        return 0
    show(document, Console(width=None if sys.stdout.isatty() else 120))
    print(f"\nReport: {out / 'report.html'}   figures: {out / 'result.json'}   raw: {out / 'records.jsonl'}")
    return 0


async def _start_local(
    experiment: Experiment, common: Common, options: Options, display: Display, stack: AsyncExitStack
) -> tuple[list[Arm], Options]:
    model = await prepare_model(common.model, display)
    display.begin("workers", "starting router and embedded workers")
    fleet = await stack.enter_async_context(local.started(local.Local(model=model)))
    display.end("workers", "serving")
    options.pids, options.names = local.pids_of(fleet), local.names_of(fleet)
    return local.arms_of(fleet, experiment.module.ARMS), options
