"""How long an engine computes: T(m, ctx) to prefill m tokens after ctx, s(R, c) for a step of R decodes and a chunk
of c.

A chunk of c tokens after ctx takes alpha + beta c + gamma c (ctx + c/2): overhead, matrix products, attention. Over
the chunks of a prompt the sums telescope, so T(m, ctx) = k alpha + beta m + gamma m (ctx + m/2) for k chunks,
exactly. A step of R decodes takes delta + rho R, reading the weights once. A mixed step reads them once for both: rho
R + max(delta, chunk).
"""

from __future__ import annotations

from tollbridge.config.calibration import DecodeFit, PrefillFit
from tollbridge.cost.regression import Regression

DEFAULT_BUDGET = 2048  # tokens of a step, where the engine does not say
_PREFILL_SCALES = (1.0, 1e3, 1e6)
_DECODE_SCALES = (1.0, 8.0)
_PREFILL_START = (5e-3, 2e-4, 0.0)  # between a CPU and a GPU; never used before something is known
_DECODE_START = (2e-2, 5e-4)
_UNSURE, _SURE = 1e-5, 4.0  # pretended observations behind a default, and behind a calibration


class EngineModel:
    """One engine's speed. Learns from what happened; `known` says whether it has, or was calibrated."""

    def __init__(self, prefill: PrefillFit | None = None, decode: DecodeFit | None = None) -> None:
        self.known = prefill is not None
        self._prefill = Regression(_PREFILL_START, _PREFILL_SCALES, prior_weight=_UNSURE)
        self._decode = Regression(_DECODE_START, _DECODE_SCALES, prior_weight=_UNSURE)
        if prefill is not None:
            start = (prefill.alpha_s, prefill.beta_s_per_token, prefill.gamma_s_per_token2)
            self._prefill = Regression(start, _PREFILL_SCALES, prior_weight=_SURE, spread=prefill.residual)
        if decode is not None:
            self._decode = Regression(
                (decode.step_s, decode.per_decode_s), _DECODE_SCALES, prior_weight=_SURE, spread=decode.residual
            )
        self._alpha_s, self._beta_s, self._gamma_s = self._prefill.coefficients
        self.delta_s, self.rho_s = self._decode.coefficients
        self.prefill_spread = self._prefill.spread  # relative standard deviation of a prediction of T

    def prefill_s(self, num_tokens: float, context: float, budget: int, num_decodes: float = 0.0) -> float:
        """Return T: seconds to prefill `num_tokens` after `context`, `num_decodes` running beside it."""
        if num_tokens <= 0:
            return 0.0
        num_chunks = num_steps(num_tokens, budget)
        chunks_s = num_chunks * self._alpha_s + num_tokens * (
            self._beta_s + self._gamma_s * (context + 0.5 * num_tokens)
        )
        least_s = num_chunks * self.delta_s
        return num_chunks * self.rho_s * num_decodes + (chunks_s if chunks_s > least_s else least_s)

    def step_s(self, num_decodes: float, chunk: float = 0.0, context: float = 0.0) -> float:
        """Return s(R, c): seconds of one step."""
        if chunk <= 0:
            return self.delta_s + self.rho_s * num_decodes
        chunk_s = self._alpha_s + chunk * (self._beta_s + self._gamma_s * (context + 0.5 * chunk))
        return self.rho_s * num_decodes + max(self.delta_s, chunk_s)

    def observe_prefill(
        self,
        seconds: float,
        num_tokens: int,
        context: int,
        budget: int,
        *,
        num_decodes: float = 0.0,
        weight: float = 1.0,
    ) -> float:
        """Learn how long a prefill took; return the relative error that T had."""
        num_chunks = num_steps(num_tokens, budget)
        predicted = self.prefill_s(num_tokens, context, budget, num_decodes)
        own_s = max(seconds - num_chunks * self.rho_s * num_decodes, 0.25 * seconds)
        features = (num_chunks, num_tokens, num_tokens * (context + 0.5 * num_tokens))
        self._prefill.observe(features, own_s, weight=weight)
        self._alpha_s, self._beta_s, self._gamma_s = self._prefill.coefficients
        self.prefill_spread, self.known = self._prefill.spread, True
        return (predicted - seconds) / seconds if seconds > 0 else 0.0

    def observe_step(self, seconds: float, num_decodes: float) -> float:
        """Learn how long a step without prefill took; return the relative error that s had."""
        error = self._decode.observe((1.0, num_decodes), seconds)
        self.delta_s, self.rho_s = self._decode.coefficients
        return error

    def fits(self) -> tuple[PrefillFit, DecodeFit]:
        """Return the fit as a calibration file has it."""
        prefill = PrefillFit(
            alpha_s=self._alpha_s,
            beta_s_per_token=self._beta_s,
            gamma_s_per_token2=self._gamma_s,
            residual=self._prefill.spread,
        )
        return prefill, DecodeFit(step_s=self.delta_s, per_decode_s=self.rho_s, residual=self._decode.spread)


def num_steps(num_tokens: float, budget: int) -> int:
    """Return the chunks that a prefill takes."""
    return -int(-num_tokens // (budget or DEFAULT_BUDGET)) or 1
