"""Small running figures: an average that resists outliers, and a rate that fades."""

from __future__ import annotations

import math

_WEIGHT = 0.1


class Average:
    """An average over about the last twenty values; one that is far off moves it by little."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._deviation = 0.0
        self.num_values = 0

    def add(self, value: float) -> None:
        self.num_values += 1
        weight = max(_WEIGHT, 1.0 / self.num_values)
        if self.num_values == 1:
            self._mean, self._deviation = value, abs(value)
            return
        bound = 3.0 * self._deviation
        step = min(max(value - self._mean, -bound), bound)
        self._mean += weight * step
        self._deviation += weight * (abs(step) - self._deviation)

    def value(self, default: float) -> float:
        return self._mean if self.num_values else default


class OutputLengths:
    """How many tokens answers have: over all, and by the bound that the client set, to a power of two.

    Requests of one kind have bounds alike: an extraction of at most 16 tokens says nothing of a chat of at most 1,024,
    but whether answers use up their bounds is a habit of the traffic.
    """

    def __init__(self) -> None:
        self._all = Average()
        self._share = Average()  # of their bounds
        self._by_bound: dict[int, Average] = {}  # of bounds with so many bits: some sixty at most

    def add(self, num_tokens: float, bound: int | None = None) -> None:
        """Note an answer to a request for at most `bound` tokens, None for a request without a bound."""
        self._all.add(num_tokens)
        if bound:
            self._share.add(num_tokens / bound)
        self._by_bound.setdefault(_num_bits(bound), Average()).add(num_tokens)

    @property
    def num_values(self) -> int:
        return self._all.num_values

    def value(self, default: float) -> float:
        """Return the average over all, `default` without any."""
        return self._all.value(default)

    def expected(self, bound: int | None, default: float) -> float:
        """Return what to expect of a request for at most `bound` tokens; `default` without a bound or any answer.

        The first of its kind is taken to be as long as any, and to use as much of its bound, up to `default`; one
        without a bound as if that were `default`.
        """
        if not self.num_values:
            return bound or default
        kind = self._by_bound.get(_num_bits(bound))
        if kind is not None:
            known = kind.value(default)
        else:
            known = max(self._all.value(default), min((bound or default) * self._share.value(1.0), default))
        return min(known, bound) if bound else known


def _num_bits(bound: int | None) -> int:
    return (bound or 0).bit_length()


class Rate:
    """Events per second, each fading with `window_s`."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._sum = 0.0
        self._at_s = -math.inf
        self._since_s: float | None = None

    def count(self, now_s: float) -> None:
        self._sum = self._faded(now_s) + 1.0
        self._at_s = now_s
        self._since_s = now_s if self._since_s is None else self._since_s

    def per_s(self, now_s: float) -> float:
        """Return the rate; a young one is over the time since its first event, of a few seconds at least."""
        if self._since_s is None:
            return 0.0
        age_s = max(now_s - self._since_s, 3.0)
        return self._faded(now_s) / (self._window_s * (1.0 - math.exp(-age_s / self._window_s)))

    def _faded(self, now_s: float) -> float:
        return self._sum * math.exp(-max(0.0, now_s - self._at_s) / self._window_s) if self._sum else 0.0
