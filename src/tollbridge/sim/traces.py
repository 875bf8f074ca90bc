"""Arrivals from recorded traces: lines in, arrivals out. Formats: AzurePublicDataset (2023), Mooncake (FAST 25).

Azure's CSV has TIMESTAMP, ContextTokens, GeneratedTokens: nothing is known of prefixes, so prompts share none. A line
of Mooncake has `timestamp` in ms, `input_length`, `output_length`, and `hash_ids`, one for each 512 tokens: equal ids
are equal tokens after equal prefixes.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice, pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

from tollbridge.errors import ConfigError
from tollbridge.sim.arrivals import Arrival, Range, own_range
from tollbridge.sim.scenario import MAX_SPAN_S, TraceSpec

MOONCAKE_BLOCK = 512  # tokens that one of its hash ids stands for
_NUM_IDS = (1 << 32) // MOONCAKE_BLOCK


class _Line(msgspec.Struct, frozen=True):
    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=0)]
    hash_ids: list[int] = []


def parse(lines: Iterable[str], spec: TraceSpec) -> list[Arrival]:
    """Return the arrivals of a trace, from time 0 on; ConfigError with the line that does not fit."""
    read = _azure if spec.format == "azure" else _mooncake
    arrivals = sorted(islice(read(lines, spec), spec.max_requests), key=lambda arrival: arrival.at_s)
    if not arrivals:
        raise ConfigError(f"The trace {spec.path} has no requests.", param="trace")
    first_s = arrivals[0].at_s
    times = _spread([each.at_s - first_s for each in arrivals], spec.bucket_s)
    if times[-1] / spec.speed > MAX_SPAN_S:
        raise ConfigError(
            f"The trace {spec.path} spans {times[-1] / spec.speed:.3g} s: mend it, or raise its speed.", param="trace"
        )
    return [each._replace(at_s=at_s / spec.speed) for each, at_s in zip(arrivals, times, strict=True)]


def _azure(lines: Iterable[str], spec: TraceSpec) -> Iterator[Arrival]:
    rows = csv.DictReader(lines)
    while True:
        try:
            row = next(rows, None)
            if row is None:
                return
            at_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=UTC).timestamp()
            num_prompt, num_output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            if min(num_prompt, num_output) < 0:
                raise ValueError
        except csv.Error:  # it has not counted this line
            raise _misfit(spec, rows.line_num + 1, "TIMESTAMP, ContextTokens and GeneratedTokens") from None
        except (KeyError, TypeError, ValueError, OverflowError):
            raise _misfit(spec, rows.line_num, "TIMESTAMP, ContextTokens and GeneratedTokens") from None
        yield Arrival(at_s, (own_range(rows.line_num, max(1, num_prompt)),), max(1, num_output))


def _mooncake(lines: Iterable[str], spec: TraceSpec) -> Iterator[Arrival]:
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            line = msgspec.json.decode(text, type=_Line)
        except msgspec.DecodeError:
            raise _misfit(spec, number, "timestamp, input_length, output_length and hash_ids") from None
        yield Arrival(line.timestamp / 1000.0, tuple(_ranges(line, number)), max(1, line.output_length))


def _ranges(line: _Line, number: int) -> Iterator[Range]:
    left = line.input_length
    for hash_id in line.hash_ids:
        if left > 0:
            yield hash_id % _NUM_IDS * MOONCAKE_BLOCK, min(left, MOONCAKE_BLOCK)
            left -= MOONCAKE_BLOCK
    if left > 0:
        yield own_range(number, left)


def _spread(times: list[float], bucket_s: float) -> list[float]:
    """Spread arrivals with one time stamp evenly over their bucket: recorded so, they are no burst."""
    if not bucket_s:
        return times
    starts = [0, *(at for at, (a, b) in enumerate(pairwise(times), start=1) if a != b), len(times)]
    spread = []
    for start, end in pairwise(starts):
        spread += [times[start] + bucket_s * at / (end - start) for at in range(end - start)]
    return sorted(spread)


def _misfit(spec: TraceSpec, number: int, wanted: str) -> ConfigError:
    return ConfigError(f"Line {number} of the trace {spec.path} does not have {wanted}.", param="trace")
