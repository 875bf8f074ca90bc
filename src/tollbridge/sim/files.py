"""The only I/O of the simulator: scenario files and traces."""

from __future__ import annotations

from pathlib import Path

import msgspec
import yaml

from tollbridge.errors import ConfigError
from tollbridge.sim.arrivals import Arrival
from tollbridge.sim.scenario import Scenario, TraceSpec, check
from tollbridge.sim.traces import parse


def read_scenario(path: Path) -> Scenario:
    """Return the scenario file; ConfigError with one sentence when it cannot be read or does not fit.

    The path of a trace is relative to the file.
    """
    try:
        raw = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise ConfigError(f"The scenario {path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"The scenario {path} is not valid YAML: {' '.join(str(error).split())}.") from None
    try:
        scenario = msgspec.convert(raw, Scenario, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"The scenario {path} does not fit: {error}.") from None
    trace = scenario.workload.trace
    if trace is not None:
        trace = msgspec.structs.replace(trace, path=str(path.parent / trace.path))
        workload = msgspec.structs.replace(scenario.workload, trace=trace)
        scenario = msgspec.structs.replace(scenario, workload=workload)
    check(scenario)
    return scenario


def read_trace(spec: TraceSpec) -> list[Arrival]:
    """Return the arrivals of a trace file; ConfigError when it cannot be read or does not fit."""
    try:
        with Path(spec.path).open(encoding="utf-8") as file:
            return parse(file, spec)
    except OSError as error:
        raise ConfigError(f"The trace {spec.path} cannot be read: {error.strerror}.", param="trace") from None
    except UnicodeDecodeError:
        raise ConfigError(f"The trace {spec.path} is not text.", param="trace") from None
