"""When requests come and with which prompts, from a seed. Pure: the generator of randomness is an argument.

Every arm of a block is given the same arrivals and prompts of the same lengths. The token ids differ from arm to arm
(`salt`), so that no arm finds in a cache what another has left there, except where a prefix is meant to be shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tollbridge.bench.records import Planned
from tollbridge.sim.arrivals import Arrival

VOCABULARIES = ((100, 40_000), (100, 30_000), (50, 500))  # ids to draw from, the first that a server knows
VOCABULARY = VOCABULARIES[0]


def arrival_times(rate_per_s: float, duration_s: float, cv: float, rng: Random) -> list[float]:
    """Return times in [0, duration_s): even (cv 0), Poisson (1), or gamma gaps of that coefficient of variation."""
    if cv == 0.0:
        return [index / rate_per_s for index in range(round(rate_per_s * duration_s))]
    times: list[float] = []
    at_s = _gap_s(rate_per_s, cv, rng)
    while at_s < duration_s:
        times.append(at_s)
        at_s += _gap_s(rate_per_s, cv, rng)
    return times


def _gap_s(rate_per_s: float, cv: float, rng: Random) -> float:
    if cv == 1.0:
        return rng.expovariate(rate_per_s)
    return rng.gammavariate(1.0 / cv**2, cv**2 / rate_per_s)


def draw(num_tokens: int, rng: Random, vocabulary: tuple[int, int] = VOCABULARY) -> list[int]:
    """Return a prompt that no cache has seen."""
    low, high = vocabulary
    return [low + int(rng.random() * (high - low)) for _ in range(num_tokens)]


def fresh(
    times: Sequence[float], num_tokens: int, max_tokens: int, rng: Random, vocabulary: tuple[int, int] = VOCABULARY
) -> list[Planned]:
    """Return a request with a prompt of its own at each of `times`."""
    return [Planned(at_s=at_s, prompt=draw(num_tokens, rng, vocabulary), max_tokens=max_tokens) for at_s in times]


def with_prefixes(
    num_requests: int, *, num_kinds: int, prefix_tokens: int, own_tokens: int, max_tokens: int, block: int, salt: str,
    seed: int, vocabulary: tuple[int, int] = VOCABULARY,
) -> list[Planned]:  # fmt: skip
    """Return requests that begin with one of `num_kinds` prefixes; which one comes when is the same for every arm."""
    prefixes = [draw(prefix_tokens, Random(f"{seed} {block} {salt} prefix {n}"), vocabulary) for n in range(num_kinds)]
    order, own = Random(f"{seed} {block} order"), Random(f"{seed} {block} {salt} own")
    return [
        Planned(
            at_s=0.0,
            prompt=prefixes[order.randrange(num_kinds)] + draw(own_tokens, own, vocabulary),
            max_tokens=max_tokens,
        )
        for _ in range(num_requests)
    ]


def from_trace(
    arrivals: Sequence[Arrival], *, scale: float, max_prompt: int, max_output: int, salt: str,
    vocabulary: tuple[int, int] = VOCABULARY,
) -> list[Planned]:  # fmt: skip
    """Return the requests of a trace, lengths divided by `scale` and cut at the limits; shared prefixes stay shared.

    A range of the trace's token ids becomes as many ids drawn from its name, so equal ranges are equal prompts.
    """
    planned = []
    for arrival in arrivals:
        prompt: list[int] = []
        for first, number in arrival.parts:
            prompt += draw(max(1, round(number / scale)), Random(f"{salt} {first}"), vocabulary)
        output = min(max_output, max(1, round(arrival.num_output / scale)))
        planned.append(Planned(at_s=arrival.at_s, prompt=prompt[:max_prompt], max_tokens=output))
    return planned


def order(names: Sequence[str], block: int, seed: int) -> list[str]:
    """Return the arms of a block in random order: a randomised complete block."""
    shuffled = list(names)
    Random(f"{seed} order {block}").shuffle(shuffled)
    return shuffled
