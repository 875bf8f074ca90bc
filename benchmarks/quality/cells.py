"""The grid, the traffic, the SLO and the noise rule. Committed before the runs; changed only with the runs thrown away.

A cell is (link, prompts, load). Within a block every arm sees the same arrival times and lengths, with token ids of
its own so that no prefix cache serves one arm what another one computed; the order of the arms is drawn by the
block's seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

LINKS = {"10": "10mbit", "30": "30mbit", "60": "60mbit", "200": "200mbit", "free": None}  # as tc writes the rate
PROMPTS = ("short", "long", "shared", "mixed")
LOADS = {"low": 0.3, "high": 0.7}  # of what both engines can do on this traffic, all local (see `arrival_rate`)
MORE_LOADS = {"mid": 0.5}  # of cells outside of the grid, for `sim-accuracy`
ARMS = ("adaptive", "local", "split", "dynamo-isl", "llm-d")
QUICK_ARMS = ("adaptive", "local", "split")
CORNERS = ("10-short-low", "10-mixed-high", "free-short-low", "free-mixed-high")
BLOCKS = 5
SEED = 20261129  # of block b: SEED + b

# The SLO follows from what the engines take unloaded, measured once per output file: a request is good when its TTFT is
# at most the prefill of so many tokens, its TPOT and the p99 of its gaps at most so many steps of four streams.
TTFT_TOKENS, TPOT_STEPS, ITL_STEPS = 2000, 4, 8

# The noise rule. Per block the log of (goodput of adaptive / goodput of the better of local and split), goodput being
# (good requests + 1/2) / window; over the blocks a 95 % t-interval. "Not more than 5 % below" is refuted by an interval
# that ends below 0.95; "20 % above both" is shown by a mean of at least 1.2 whose interval begins above 1.
FLOOR, GAIN = 0.95, 1.2

VOCABULARY = (100, 40_000)  # ids to draw prompts from: ordinary tokens of SmolLM2
NUM_PREFIXES, PREFIX_TOKENS = 4, 512


@dataclass(frozen=True)
class Speed:
    """What an engine takes unloaded."""

    token_s: float  # per prompt token
    step_s: float  # of four streams

    @property
    def slo(self) -> tuple[float, float, float]:
        """(TTFT, TPOT, p99 of the gaps), in seconds."""
        return TTFT_TOKENS * self.token_s, TPOT_STEPS * self.step_s, ITL_STEPS * self.step_s


@dataclass(frozen=True)
class Request:
    """One arrival, relative to the start of its window."""

    at_s: float
    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Cell:
    link: str
    prompts: str
    load: str

    @property
    def name(self) -> str:
        return f"{self.link}-{self.prompts}-{self.load}"


def grid() -> list[Cell]:
    """Return every cell, links outermost."""
    return [Cell(link, prompts, load) for link in LINKS for prompts in PROMPTS for load in LOADS]


def find(name: str) -> Cell:
    """Return the cell called `name`, of the grid or with one more load; KeyError when there is none."""
    more = [Cell(link, prompts, load) for link in LINKS for prompts in PROMPTS for load in MORE_LOADS]
    return {cell.name: cell for cell in [*grid(), *more]}[name]


def order(arms: tuple[str, ...], block: int, cell: Cell) -> list[str]:
    """Return the arms of a block in random order."""
    drawn = list(arms)
    random.Random(f"{SEED + block} {cell.name} order").shuffle(drawn)
    return drawn


def lengths(prompts: str, rng: random.Random) -> tuple[int, int]:
    """Draw (prompt tokens, output tokens)."""
    kind = prompts
    if prompts == "mixed":
        kind = "long" if rng.random() < 0.3 else "short"
    if kind == "short":
        return rng.randint(16, 96), 32
    if kind == "long":
        return rng.randint(512, 896), 16
    return PREFIX_TOKENS + rng.randint(16, 96), 24


def traffic(cell: Cell, block: int, arm: str, *, rate_per_s: float, window_s: float) -> list[Request]:
    """Return the arrivals of one window: Poisson, the same for all arms but for the token ids."""
    shape = random.Random(f"{SEED + block} {cell.name}")
    tokens = random.Random(f"{SEED + block} {cell.name} {arm}")
    prefixes = [[tokens.randint(*VOCABULARY) for _ in range(PREFIX_TOKENS)] for _ in range(NUM_PREFIXES)]
    requests: list[Request] = []
    at_s = shape.expovariate(rate_per_s)
    while at_s < window_s:
        num_tokens, max_tokens = lengths(cell.prompts, shape)
        prefix = prefixes[shape.randrange(NUM_PREFIXES)] if cell.prompts == "shared" else []
        own = [tokens.randint(*VOCABULARY) for _ in range(num_tokens - len(prefix))]
        requests.append(Request(at_s, [*prefix, *own], max_tokens))
        at_s += shape.expovariate(rate_per_s)
    return requests


def arrival_rate(cell: Cell, speed: Speed) -> float:
    """Return requests/s at the cell's load.

    The work of a request is its prefill (a shared prefix is computed once) and its steps, four streams to a step.
    """
    rng = random.Random(f"{SEED} {cell.prompts}")
    works = []
    for _ in range(2000):
        num_tokens, max_tokens = lengths(cell.prompts, rng)
        computed = num_tokens - (PREFIX_TOKENS if cell.prompts == "shared" else 0)
        works.append(speed.token_s * computed + speed.step_s * max_tokens / 4)
    return (LOADS | MORE_LOADS)[cell.load] * 2 / (sum(works) / len(works))
