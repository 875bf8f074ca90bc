"""What a run writes down, one JSON line each: its head, every request as the client saw it, every window.

A window is one arm at one cell in one block. Its requests come first, then the window itself: a window without its own
line was cut off, and is run again when the run is resumed. All times of a request count from the start of its window.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import msgspec

VERSION = 1


class Arm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A way to be served, and what it takes."""

    name: str
    url: str
    title: str = ""  # for people; empty: the name
    policy: str | None = None  # asked of the router, by header
    model: str | None = None  # None: the request names none
    workers: list[str] = []  # base URLs whose /metrics are read before and after
    num_workers: int = 1  # what it costs: workers (GPUs)
    api_key_env: str | None = None  # the environment variable that holds the key

    @property
    def label(self) -> str:
        return self.title or self.name


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """One request that is to be sent."""

    at_s: float  # from the start of the window; ignored in a closed loop
    prompt: list[int] | str
    max_tokens: int
    group: str = "request"  # "steady" streams run through the whole window and are cut off at its end

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) if isinstance(self.prompt, list) else 0


class Head(msgspec.Struct, frozen=True, kw_only=True, tag="head"):
    """The first line: what the file is about. A run is resumed only where it is the same."""

    experiment: str
    parameters: dict[str, object]
    arms: list[str]
    seed: int
    conditions: dict[str, object] = {}  # machine and versions; may differ when a run is resumed
    version: int = VERSION


class Plan(msgspec.Struct, frozen=True, kw_only=True, tag="plan"):
    """What was measured first and then held for all windows."""

    values: dict[str, float]


class Sample(msgspec.Struct, frozen=True, kw_only=True, tag="request", omit_defaults=True):
    """One request as the client saw it."""

    cell: str
    block: int
    arm: str
    index: int
    group: str
    at_s: float  # when it was due
    sent_s: float  # when it was sent
    num_prompt_tokens: int
    max_tokens: int
    ttft_s: float | None = None  # first token - request sent
    gaps_s: list[float] = []  # between consecutive chunks that carried tokens
    num_tokens: int = 0  # generated, as far as the client can tell
    num_merged: int = 0  # tokens beyond the first of a chunk: their arrival is not known apart
    num_cached: int | None = None  # prompt tokens the server says it found in its cache
    failure: str = ""  # see `answer.py`; empty: it was served
    detail: str = ""
    cut: bool = False  # by us, at the end of the window
    decision: str = ""  # id of the router's decision
    choice: str = ""  # local | split, by the router
    wire_bytes: int = 0  # KV payload of its transfer, as the decode worker reports it
    wire_s: float = 0.0
    queue_s: float | None = None

    @property
    def lag_s(self) -> float:
        return self.sent_s - self.at_s

    @property
    def latency_s(self) -> float | None:
        """Last token - request sent."""
        return None if self.ttft_s is None else self.ttft_s + sum(self.gaps_s)

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None when there was none."""
        return sum(self.gaps_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def ok(self) -> bool:
        return not self.failure and self.ttft_s is not None

    def gaps_within(self, end_s: float) -> Iterator[float]:
        """Yield the gaps that ended within [0, end_s)."""
        if self.ttft_s is None:
            return
        arrivals = [self.sent_s + self.ttft_s]
        for gap in self.gaps_s:
            arrivals.append(arrivals[-1] + gap)
        for before, after in pairwise(arrivals):
            if 0.0 <= after < end_s:
                yield after - before


class Window(msgspec.Struct, frozen=True, kw_only=True, tag="window", omit_defaults=True):
    """One arm at one cell in one block, as a whole."""

    cell: str
    block: int
    arm: str
    duration_s: float  # from its start until the last request had ended; of steady streams: until they were cut off
    num_requests: int
    num_workers: int = 1
    offered_per_s: float | None = None  # requests; None in a closed loop
    counters: dict[str, dict[str, float]] = {}  # by worker: what its /metrics grew by
    memory: dict[str, list[tuple[float, float]]] = {}  # by worker: (seconds, resident bytes)
    energy_j: float | None = None  # of all GPUs together; None: nobody knows
    note: str = ""


class LinkRate(msgspec.Struct, frozen=True, kw_only=True, tag="link"):
    """What plain sockets carried between the workers' hosts, before or after a block."""

    cell: str
    block: int
    bytes_per_s: float


Line = Head | Plan | Sample | Window | LinkRate


def encode(line: Line) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def decode(raw: bytes) -> Line:
    """Return one line; msgspec.DecodeError when it is none of ours."""
    line: Line = msgspec.json.decode(raw, type=Line)
    return line
