"""Prefill time of a prompt: through measured points, or by a fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from tollbridge.config.quantity import LARGEST
from tollbridge.errors import ConfigError

LEAST_S = 1e-9  # of a prefill: less is none


class Sample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measurement: `tokens` prompt tokens, none of them cached, took `seconds`."""

    tokens: int
    seconds: float


class Prefill:
    """T(n), seconds. Through the points in straight lines, in proportion below the first; beyond the last the last
    line goes on. One point is a time per token."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        if not samples or any(sample.tokens < 1 or not LEAST_S <= sample.seconds <= LARGEST for sample in samples):
            raise ConfigError(
                "Prefill needs measured points with tokens >= 1 and seconds from 1e-9 on.", param="prefill"
            )
        self.samples = sorted(samples, key=lambda sample: sample.tokens)
        self._tokens = [0, *(sample.tokens for sample in self.samples)]
        self._seconds = [0.0, *(sample.seconds for sample in self.samples)]
        if len(set(self._tokens)) != len(self._tokens):
            raise ConfigError("Prefill has two points for one length: keep one of them.", param="prefill")

    def seconds(self, num_tokens: float) -> float:
        """Return T of a prompt of `num_tokens`."""
        at = min(max(bisect_left(self._tokens, num_tokens), 1), len(self._tokens) - 1)
        t0, t1 = self._tokens[at - 1 : at + 1]
        s0, s1 = self._seconds[at - 1 : at + 1]
        return s0 + (num_tokens - t0) * max(s1 - s0, 0.0) / (t1 - t0)

    def per_token_s(self, num_tokens: float) -> float:
        return self.seconds(num_tokens) / num_tokens if num_tokens > 0 else 0.0
