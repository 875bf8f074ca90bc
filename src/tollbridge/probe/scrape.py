"""What a server's own metrics say: the few figures that a probe reads before and after. Pure.

Names are those of vLLM 0.31 (which our workers share) and of SGLang; what a server does not have is None.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_ENDED = ("vllm:request_success_total", "sglang:num_requests_total")
_CACHED = ("vllm:prefix_cache_hits_total", "sglang:cached_tokens_total")
_PREFILL = "vllm:request_prefill_time_seconds"
_ROUTER = "tollbridge_router_"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One look at `/metrics`. Sums over labels."""

    open: float  # requests running or waiting
    ended: float | None  # since its start
    prefill_s: float | None  # sum over all requests
    num_prefills: float
    cached_tokens: float | None  # prompt tokens found in the prefix cache, since its start
    is_router: bool = False

    def restarted_since(self, before: Reading) -> bool:
        """Return whether another process has answered: its counters begin again."""
        return (self.ended or 0.0) < (before.ended or 0.0) or self.num_prefills < before.num_prefills


def read(text: str) -> Reading:
    """Return what is known from an exposition in Prometheus' text format."""
    sums = _sums(text)
    first = _First(sums)
    return Reading(
        open=(first(_RUNNING) or 0.0) + (first(_WAITING) or 0.0),
        ended=first(_ENDED),
        prefill_s=sums.get(_PREFILL + "_sum"),
        num_prefills=sums.get(_PREFILL + "_count", 0.0),
        cached_tokens=first(_CACHED),
        is_router=any(name.startswith(_ROUTER) for name in sums),
    )


class _First:
    """The first of several names that the server has."""

    def __init__(self, sums: dict[str, float]) -> None:
        self._sums = sums

    def __call__(self, names: tuple[str, ...]) -> float | None:
        return next((self._sums[name] for name in names if name in self._sums), None)


def _sums(text: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        head, brace, tail = line.rpartition("}")
        name = head.partition("{")[0] if brace else line.split()[0]
        try:
            value = float((tail if brace else line.partition(" ")[2]).split()[0])
        except (IndexError, ValueError):
            continue  # no sample of a format that we know
        if not math.isfinite(value):
            continue
        sums[name] = sums.get(name, 0.0) + value
    return sums
