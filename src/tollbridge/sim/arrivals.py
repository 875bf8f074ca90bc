"""Who comes when, with which prompt: synthetic traffic. Prompts are kept as ranges of token ids: they take no room."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

from tollbridge.sim.scenario import ClassSpec, LengthSpec, WorkloadSpec

_OWN = 1 << 21  # token ids below name shared prefixes
_STEP = 8  # between the first own tokens of two requests: no two have a block in common
_HIGHEST = (1 << 32) - (1 << 21)
Range = tuple[int, int]  # (first token id, number)


class Arrival(NamedTuple):
    """One request. `parts` are what its prompt consists of."""

    at_s: float
    parts: tuple[Range, ...]
    num_output: int

    @property
    def num_prompt(self) -> int:
        return sum(number for _, number in self.parts)

    def tokens(self) -> list[int]:
        tokens: list[int] = []
        for first, number in self.parts:
            tokens.extend(range(first, first + number))
        return tokens


def own_range(index: int, number: int) -> Range:
    """Return tokens of request `index` that no other request begins with."""
    return _OWN + index * _STEP % (_HIGHEST - _OWN), number


def synthetic(workload: WorkloadSpec, duration_s: float, rng: Random) -> list[Arrival]:
    """Return the arrivals of `duration_s`; all that is random is drawn from `rng`."""
    weights = [each.weight for each in workload.classes]
    arrivals = []
    for index, at_s in enumerate(_times(workload, duration_s, rng)):
        at = rng.choices(range(len(weights)), weights)[0] if len(weights) > 1 else 0
        arrivals.append(_arrival(index, at_s, at, workload.classes[at], rng))
    return arrivals


def _times(workload: WorkloadSpec, duration_s: float, rng: Random) -> Iterator[float]:
    at_s = _gap_s(workload, rng)
    while at_s < duration_s:
        yield at_s
        at_s += _gap_s(workload, rng)


def _gap_s(workload: WorkloadSpec, rng: Random) -> float:
    mean_s, cv = 1.0 / workload.rate_per_s, workload.burstiness_cv
    if cv == 0.0:
        return mean_s
    if cv == 1.0:
        return rng.expovariate(workload.rate_per_s)
    return rng.gammavariate(1.0 / cv**2, mean_s * cv**2)


def _arrival(index: int, at_s: float, at: int, kind: ClassSpec, rng: Random) -> Arrival:
    num_prompt, num_output = _length(kind.prompt_tokens, rng), _length(kind.output_tokens, rng)
    if not kind.prefix_tokens:
        return Arrival(at_s, (own_range(index, num_prompt),), num_output)
    prefix = (at << 14) + rng.randrange(kind.num_prefixes)
    own = max(1, num_prompt - kind.prefix_tokens)
    return Arrival(at_s, ((prefix, kind.prefix_tokens), own_range(index, own)), num_output)


def _length(spec: LengthSpec, rng: Random) -> int:
    drawn = spec.median * math.exp(rng.gauss(0.0, spec.sigma)) if spec.sigma else spec.median
    return min(spec.max, max(spec.min, round(drawn)))


def offered_tokens(arrivals: Sequence[Arrival]) -> tuple[int, int]:
    """Return (prompt tokens, output tokens) of all."""
    return sum(each.num_prompt for each in arrivals), sum(each.num_output for each in arrivals)
