"""Decision records -> rows and windows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tollbridge.config.cluster import SloConfig
from tollbridge.router.payoff import maybe_payoff, maybe_toll_s, maybe_tpot_s, meets
from tollbridge.ui.snapshot import Phase, RequestRow, Window
from tollbridge.wire.decision import DecisionRecord

WINDOW_S = 10.0
MAX_SAMPLE = 256  # requests of a window whose times are looked at
MAX_WHY = 240  # characters of a sentence


def row(record: DecisionRecord, slo: SloConfig) -> RequestRow:
    """Return one record in short."""
    decision, happened = record.decision, record.happened
    report, terms = happened.decode_report, decision.terms
    is_split, ended = decision.choice == "split", happened.status != "running"
    payoff = maybe_payoff(decision, happened)
    computed_by = happened.prefill_report if is_split else report
    prompt_tokens = happened.prompt_tokens or int(terms.get("prompt_tokens", 0))
    cached = int(terms.get("decode_cached_tokens" if is_split else "cached_tokens", 0))
    return RequestRow(
        id=decision.id,
        at=record.at,
        choice=decision.choice,
        policy=decision.policy,
        reason=decision.reason,
        why=decision.why[:MAX_WHY],
        decode=decision.decode,
        prefill=decision.prefill,
        status=happened.status,
        phase=phase(record),
        prompt_tokens=prompt_tokens,
        cached_tokens=int(terms.get("cached_tokens", 0)),
        completion_tokens=happened.completion_tokens,
        queue_s=_short(happened.queue_s) or 0.0,
        ttft_s=None if happened.ttft_s is None else _short(happened.queue_s + happened.ttft_s),
        predicted_ttft_s=_short(terms.get("ttft_s")),
        tpot_s=_short(maybe_tpot_s(happened)),
        longest_gap_s=_short(happened.longest_gap_s),
        total_s=_short(happened.total_s),
        lacked_tokens=max(prompt_tokens - 1 - cached, 0),
        toll_s=_short(maybe_toll_s(decision, happened)) if is_split and ended else None,
        prefill_s=_short(computed_by.prefill_s) if computed_by is not None else None,
        avoided_s=_short(payoff.avoided_s) if payoff is not None else None,
        kv_bytes=report.transfer.payload_bytes if report is not None and report.transfer is not None else 0,
        verified=happened.split_verified,
        in_slo=meets(happened, slo) if ended else None,
        error=happened.error[:MAX_WHY],
    )


def phase(record: DecisionRecord) -> Phase:
    """Return where the request is. What is not streamed counts as prefill to its end: nobody sees its first token."""
    decision, happened = record.decision, record.happened
    if happened.status != "running":
        return "ended"
    if happened.ttft_s is not None:
        return "decode"
    return "transfer" if decision.choice == "split" and happened.prefill_report is not None else "prefill"


def ended_at(record: DecisionRecord) -> float:
    """Return when a request ended, in Unix seconds."""
    return record.at + (record.happened.total_s or 0.0)


def ended(records: Iterable[DecisionRecord]) -> list[DecisionRecord]:
    """Return those that have ended, the latest end first."""
    return sorted((each for each in records if each.happened.status != "running"), key=ended_at, reverse=True)


def window(newest_first: Sequence[DecisionRecord], slo: SloConfig, now: float, *, is_whole: bool) -> Window:
    """Return figures of what ended within the last seconds, of as many as are remembered.

    With `is_whole` nothing has been forgotten yet; otherwise the window is no longer than memory reaches back.
    """
    reach_s = WINDOW_S if is_whole or not newest_first else now - ended_at(newest_first[-1])
    seconds = max(min(WINDOW_S, reach_s), 0.1)
    ends = [each.happened for each in newest_first if ended_at(each) > now - seconds]
    inside = ends[:: max(1, -(-len(ends) // MAX_SAMPLE))]
    ttfts = sorted(each.queue_s + each.ttft_s for each in inside if each.ttft_s is not None)
    tpots = sorted(tpot_s for each in inside if (tpot_s := maybe_tpot_s(each)) is not None)
    gaps = sorted(each.longest_gap_s for each in inside if each.longest_gap_s is not None)
    return Window(
        seconds=seconds,
        num_ended=len(ends),
        slo_share=_short(sum(meets(each, slo) for each in inside) / len(inside)) if inside else None,
        ttft_p50_s=_short(percentile(ttfts, 0.5)),
        ttft_p95_s=_short(percentile(ttfts, 0.95)),
        tpot_p50_s=_short(percentile(tpots, 0.5)),
        tpot_p95_s=_short(percentile(tpots, 0.95)),
        gap_p95_s=_short(percentile(gaps, 0.95)),
    )


def percentile(ascending: Sequence[float], share: float) -> float | None:
    """Return the value that `share` of the values do not exceed (nearest rank); None of nothing."""
    if not ascending:
        return None
    return ascending[min(int(share * len(ascending)), len(ascending) - 1)]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
