"""Is splitting paying off? What one split cost its own request, and what it spared the others. And: was the SLO met?

Cost and gain are both seconds. The toll is measured: TTFT less what prefill took on its worker. The stall that was
avoided cannot be measured, it did not happen. It is what the cost model says of the same workers without splits, where
the prompt is computed beside the streams of an average worker: seconds, summed over them, less what streams on the
prefill worker stood still. (The best local way would be no measure: it is free, often, because others were split.)
"""

from __future__ import annotations

from typing import NamedTuple

from tollbridge.config.cluster import SloConfig
from tollbridge.wire.decision import Decision, Happened


class Payoff(NamedTuple):
    toll_s: float
    avoided_s: float


def maybe_payoff(decision: Decision, happened: Happened) -> Payoff | None:
    """Return what a split that was answered has cost and gained; None for any other request."""
    if decision.choice != "split" or happened.status != "ok":
        return None
    toll_s = maybe_toll_s(decision, happened)
    if toll_s is None:
        return None
    terms = decision.terms
    avoided_s = terms.get("fleet_streams", 0.0) * terms.get("stall_s", 0.0)
    caused_s = terms.get("streams", 0.0) * terms.get("slowed_s", 0.0)
    # A split whose KV did not come has computed its prompt on the decode worker after all.
    return Payoff(toll_s, max(avoided_s - caused_s, 0.0) if happened.split_verified else 0.0)


def maybe_toll_s(decision: Decision, happened: Happened) -> float | None:
    """Return the toll as measured, as predicted where no report came; None when neither is known."""
    report = happened.prefill_report
    if report is None or happened.ttft_s is None:
        return decision.terms.get("toll_s")
    return max(happened.ttft_s - report.queue_s - report.prefill_s, 0.0)


def maybe_tpot_s(happened: Happened) -> float | None:
    """Return the mean gap between two tokens of a stream, None while it runs or when it has too few.

    Of several choices, which decode side by side, that of one of mean length.
    """
    num_gaps = _num_gaps(happened)
    if happened.ttft_s is None or happened.total_s is None or num_gaps <= 0.0:
        return None
    return max(happened.total_s - happened.ttft_s, 0.0) / num_gaps


def meets(happened: Happened, slo: SloConfig) -> bool:
    """Return whether a request that ended counts as goodput: answered, TTFT and time per token within the SLO.

    Of an answer that came whole only the sum is known, so the sum is held to the sum.
    """
    if happened.status != "ok" or happened.total_s is None:
        return False
    if happened.ttft_s is None:
        allowed_s = slo.ttft_s + slo.tpot_s * max(_num_gaps(happened), 0.0)
        return happened.queue_s + happened.total_s <= allowed_s
    tpot_s = maybe_tpot_s(happened)
    return happened.queue_s + happened.ttft_s <= slo.ttft_s and (tpot_s is None or tpot_s <= slo.tpot_s)


def _num_gaps(happened: Happened) -> float:
    return happened.completion_tokens / happened.num_choices - 1.0
