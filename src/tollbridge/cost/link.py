"""What a path between two hosts carries, and what is left of it for one more transfer.

Each report of a transfer proves an interval. Its own rate r is what the path carries at least. At most it carries r
times the transfers that shared it, provided that the path, and not the prefill, set the pace: otherwise nothing is
proven above r. An estimate inside the interval stands, one outside moves towards it. So neither sharing that we
caused ourselves nor a transfer that waited for its prefill is ever learnt as a slower link, and a faster one is
noticed at once. Until something proves a most, the best rate seen is the estimate, but from the third on one transfer
raises it at most fourfold: it may have been timed wrong. One slow transfer may have been a hiccup, and so may several
that shared it; a second in a row that had the path to itself moves the estimate by orders of magnitude.
"""

from __future__ import annotations

import math

MIN_SAMPLE_BYTES = 64 * 1024  # less says more about latency than about goodput
START_SPREAD = 0.5
PACE = 1.25  # a transfer so much longer than its prefill was as fast as the path
MIN_SPREAD = 0.03
_UP, _DOWN = 0.6, 0.4  # how far the estimate moves
_MOST_UP = 4.0
_AGAIN = 0.6  # the same for a slower transfer after a slower one, both alone, on a logarithmic scale
_ALONE = 1.5  # high / low of such a one is less
_SPREAD_WEIGHT = 0.15


class LinkModel:
    """Goodput from one host to another, bytes per second. 0: never seen."""

    def __init__(self, goodput_bytes_per_s: float = 0.0, *, spread: float = START_SPREAD) -> None:
        self.goodput_bytes_per_s = goodput_bytes_per_s
        self._deviation = spread
        self.num_observations = 0
        self.is_bounded = goodput_bytes_per_s > 0.0  # whether anything ever said what it carries at most
        self._num_slower = 0  # that were alone, in a row

    @property
    def known(self) -> bool:
        return self.goodput_bytes_per_s > 0.0

    @property
    def spread(self) -> float:
        return max(MIN_SPREAD, self._deviation)

    def observe(self, low: float, high: float = math.inf) -> float:
        """Learn that the goodput lies in [low, high]; return the relative error of the estimate before."""
        if not 0.0 < low <= high:
            return 0.0
        self.num_observations += 1
        before = self.goodput_bytes_per_s
        was_bounded = self.is_bounded
        self.is_bounded = was_bounded or high < math.inf
        if not before:
            self.goodput_bytes_per_s = low
            return 0.0
        nearest = min(max(before, low), high)
        is_slower_alone = nearest < before and high < _ALONE * low
        self._num_slower = 0 if nearest >= before else self._num_slower + is_slower_alone
        if is_slower_alone and self._num_slower > 1:
            self.goodput_bytes_per_s = before * (nearest / before) ** _AGAIN
        else:
            if nearest > before and not was_bounded:
                is_second = self.num_observations == 2  # the first may have waited for a connection
                self.goodput_bytes_per_s = nearest if is_second else min(nearest, _MOST_UP * before)
            else:
                self.goodput_bytes_per_s = before + (_UP if nearest > before else _DOWN) * (nearest - before)
        error = (before - nearest) / nearest
        self._deviation += _SPREAD_WEIGHT * (min(1.25 * abs(error), 1.0) - self._deviation)
        return error


def overlaps(connector: str) -> bool:
    """Return whether KV crosses while the prompt is being computed; vLLM's NIXL connectors send it behind that."""
    return not connector.startswith("nixl")


def proven(payload_bytes: float, wire_s: float, *, num_sharing: float, prefill_s: float) -> tuple[float, float] | None:
    """Return the interval of goodput that one transfer proves, None when it proves nothing.

    `num_sharing` counts the transfers on the path meanwhile, this one included (rather too many than too few);
    `prefill_s` is the time over which prefill handed out the KV.
    """
    if payload_bytes < MIN_SAMPLE_BYTES or wire_s <= 1e-4:
        return None
    rate = payload_bytes / wire_s
    path_set_the_pace = wire_s > PACE * prefill_s
    return rate, rate * max(1.0, num_sharing) if path_set_the_pace else math.inf
