"""`tollbridge sim`: the fleet, the network and the traffic in a model; the decisions by the real code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def sim(
    file: Annotated[Path | None, Parameter(help="A scenario (docs/sim.md); options override it.")] = None,
    *,
    policy: Annotated[list[str] | None, Parameter(help="To compare; may be repeated.")] = None,
    calibration: Annotated[
        Path | None, Parameter(help="Written by `tollbridge probe`: its first engine is what every worker is.")
    ] = None,
    azure: Annotated[Path | None, Parameter(help="Replay a trace of AzurePublicDataset (CSV).")] = None,
    mooncake: Annotated[Path | None, Parameter(help="Replay a trace in Mooncake's format (JSON lines).")] = None,
    rate: Annotated[float | None, Parameter(help="Arrivals per second.")] = None,
    duration: Annotated[float | None, Parameter(help="Seconds of arrivals.")] = None,
    seed: Annotated[int, Parameter(help="The same seed gives the same result.")] = 1,
    search: Annotated[bool, Parameter(help="Look for the placement and ratio with the best goodput per GPU.")] = False,
    seeds: Annotated[int, Parameter(help="How many seeds a search takes.")] = 5,
    step_by_step: Annotated[bool, Parameter(help="Simulate each decode step by itself: slower, the same.")] = False,
    json: Annotated[bool, Parameter(help="Print one JSON document.")] = False,
) -> int:
    """Compare policies on a simulated fleet, or look for the best placement."""
    import sys

    import msgspec
    from rich.console import Console

    from tollbridge.config.calibration import read_calibration
    from tollbridge.errors import ConfigError
    from tollbridge.sim.files import read_scenario, read_trace
    from tollbridge.sim.run import compare, draw_arrivals
    from tollbridge.sim.scenario import Scenario, TraceSpec, check
    from tollbridge.sim.search import search as search_for
    from tollbridge.sim.text import render, render_search

    replace = msgspec.structs.replace
    scenario = read_scenario(file) if file else Scenario()
    work = scenario.workload
    if azure is not None and mooncake is not None:
        raise ConfigError("Give one trace: --azure or --mooncake.")
    if azure is not None:
        work = replace(work, trace=TraceSpec(format="azure", path=str(azure)))
    if mooncake is not None:
        work = replace(work, trace=TraceSpec(format="mooncake", path=str(mooncake)))
    if rate is not None:
        work = replace(work, rate_per_s=rate)
    engine = scenario.engine
    if calibration is not None:
        measured = next(iter(read_calibration(calibration).engines.values()), None)
        if measured is None or measured.decode is None:
            raise ConfigError(f"The calibration {calibration} has no engine with prefill and decode: probe one.")
        engine = replace(engine, prefill=measured.prefill, decode=measured.decode)
    scenario = replace(
        scenario,
        workload=work,
        engine=engine,
        policies=policy or scenario.policies,
        duration_s=scenario.duration_s if duration is None else duration,
    )
    if seeds < 1:
        raise ConfigError("--seeds must be at least 1.", param="seeds")
    check(scenario)
    console = Console()
    if search:

        def tell(name: str, at: int) -> None:
            if sys.stderr.isatty():
                print(f"seed {at}: {name}", file=sys.stderr)

        found = search_for(scenario, range(seed, seed + seeds), progress=tell)
        if json:
            print(msgspec.json.encode(found).decode())
        else:
            console.print(render_search(found))
        return 0
    trace = scenario.workload.trace
    arrivals = read_trace(trace) if trace is not None else draw_arrivals(scenario, seed)
    made = compare(scenario, arrivals, seed=seed, fast=not step_by_step)
    if json:
        print(msgspec.json.encode(made).decode())
    else:
        console.print(render(made))
    return 0
