"""The only I/O of the simulator: scenario files and traces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from tollbridge.config.quantity import parse_bytes, parse_rate, parse_seconds
from tollbridge.errors import ConfigError
from tollbridge.sim.arrivals import Arrival
from tollbridge.sim.scenario import Scenario, TraceSpec, check
from tollbridge.sim.traces import parse

_Parse = Callable[[str | float, str], float]
_QUANTITIES: tuple[tuple[str, _Parse | None], ...] = (  # the first that fits
    ("_bytes_per_s", parse_rate),
    ("_bytes_per_token", parse_bytes),
    ("_per_s", None),  # a number of requests
    ("_s", parse_seconds),
    ("_s_per_token", parse_seconds),
)


def read_scenario(path: Path) -> Scenario:
    """Return the scenario file; ConfigError with one sentence when it cannot be read or does not fit.

    The path of a trace is relative to the file.
    """
    try:
        raw = in_numbers(yaml.safe_load(path.read_text()) or {})
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


def in_numbers(value: Any, key: str = "") -> Any:
    """Return a scenario with its quantities as numbers: a text under a key that ends in a unit, such as "10 Gb/s".

    ConfigError naming the key when it is no such quantity.
    """
    if isinstance(value, dict):
        return {name: in_numbers(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [in_numbers(inner, key) for inner in value]
    if not isinstance(value, str):
        return value
    parse = next((parse for unit, parse in _QUANTITIES if key.endswith(unit)), None)
    return value if parse is None else parse(value, key)


def read_trace(spec: TraceSpec) -> list[Arrival]:
    """Return the arrivals of a trace file; ConfigError when it cannot be read or does not fit."""
    try:
        with Path(spec.path).open(encoding="utf-8-sig", newline="") as file:
            return parse(file, spec)
    except OSError as error:
        raise ConfigError(f"The trace {spec.path} cannot be read: {error.strerror}.", param="trace") from None
    except UnicodeDecodeError:
        raise ConfigError(f"The trace {spec.path} is not text.", param="trace") from None
