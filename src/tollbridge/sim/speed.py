"""How long a simulated step takes: the same form as `cost/engine.py`, for several chunks in one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tollbridge.config.calibration import DecodeFit, PrefillFit
from tollbridge.sched.plan import SequenceChunk


@dataclass(frozen=True)
class Speed:
    """Seconds; the weights are read once for a whole step, so a chunk hides the constant part of a decode."""

    prefill: PrefillFit
    decode: DecodeFit

    def decodes_s(self, num_decodes: int) -> float:
        return self.decode.step_s + self.decode.per_decode_s * num_decodes

    def step_s(self, chunks: Sequence[SequenceChunk]) -> float:
        """Return the duration of one step; a chunk of one token counts as a decode."""
        num_decodes, prefill_s = 0, 0.0
        for chunk in chunks:
            size = len(chunk.token_ids)
            if size == 1:
                num_decodes += 1
                continue
            context = chunk.first_token + 0.5 * size
            prefill_s += size * (self.prefill.beta_s_per_token + self.prefill.gamma_s_per_token2 * context)
        if not prefill_s:
            return self.decodes_s(num_decodes)
        return self.decode.per_decode_s * num_decodes + max(self.decode.step_s, self.prefill.alpha_s + prefill_s)
