"""From terms to a verdict: per prompt length, and for the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from tollbridge.config.quantity import show_rate, show_seconds
from tollbridge.plan.terms import Setting, Terms, bought_s, link_for

Answer = Literal["never", "sometimes", "always", "chunked prefill is enough"]
MIN_CHUNK = 64  # tokens: below it the weights are read more often than prefill is worth


class LengthVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict about one prompt length. `flips_at_bytes_per_s` is the slowest link that would change a "never"."""

    answer: Answer
    why: str
    chunk_tokens: int | None = None  # the longest chunk whose step keeps the gap within its SLO
    flips_at_bytes_per_s: float | None = None
    flips_with_streams_per_gpu: float | None = None  # on the link at hand: streams beside it for which it would pay
    offered_bytes_per_s: float = 0.0  # on the busiest worker's link, if all requests of this length are split


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict about the cluster."""

    answer: Literal["do not split", "split some requests", "split"]
    why: str
    flips_at_bytes_per_s: float | None = None


def judge(setting: Setting, terms: Terms, offered_bytes_per_s: float = 0.0) -> LengthVerdict:
    """Return the verdict about one prompt length; on a tie the answer is not to split.

    `offered_bytes_per_s` is what these requests put on one link in the long run, 0 when no rate is known. A link that
    is offered more than it carries at its best has a queue that grows for ever, whatever one split would pay.
    """
    verdict = _judge_one(setting, terms)
    if offered_bytes_per_s >= setting.link.high:
        return _saturated(setting, verdict, offered_bytes_per_s)
    if offered_bytes_per_s >= setting.link.low and verdict.answer == "always":
        needed = show_rate(offered_bytes_per_s)
        why = f"{verdict.why} But all of them need {needed}, which the link carries at times only."
        verdict = msgspec.structs.replace(verdict, answer="sometimes", why=why)
    return msgspec.structs.replace(verdict, offered_bytes_per_s=offered_bytes_per_s)


def _judge_one(setting: Setting, terms: Terms) -> LengthVerdict:
    """Return the verdict about a request that meets no others on the link."""
    slo = setting.slo
    chunk = longest_chunk(setting, terms.prompt_tokens, terms.prompt_tokens - terms.computed_tokens)
    best_toll_s, worst_toll_s = terms.toll_s
    missed = terms.ttft_split_s[0] > slo.ttft_s >= terms.ttft_local_s
    if missed or best_toll_s >= terms.bought_s:
        return _never(setting, terms, chunk, missed=missed)
    flips = link_for(setting, terms, _allowed_s(setting, terms))
    if worst_toll_s < bought_s(setting, terms.stall_s, streams=1.0) and terms.ttft_split_s[1] <= slo.ttft_s:
        why = f"Even at the worst its toll, {show_seconds(worst_toll_s)}, is less than it spares a single stream."
        return LengthVerdict(answer="always", why=why, chunk_tokens=chunk, flips_at_bytes_per_s=flips)
    why = (
        f"Its toll is {_interval(terms.toll_s)}; with {setting.load.streams_per_gpu:.3g} streams on each GPU it spares "
        f"them {show_seconds(terms.bought_s)} worth of TTFT, with fewer less: let the router decide."
    )
    return LengthVerdict(answer="sometimes", why=why, chunk_tokens=chunk, flips_at_bytes_per_s=flips)


def conclude(setting: Setting, lengths: Sequence[tuple[Terms, LengthVerdict]]) -> Verdict:
    """Return the verdict about all lengths together."""
    paying = [terms.prompt_tokens for terms, verdict in lengths if verdict.answer in ("sometimes", "always")]
    if not paying:
        return _do_not_split(setting, lengths)
    if len(paying) == len(lengths) and all(verdict.answer == "always" for _, verdict in lengths):
        return Verdict(answer="split", why="At every length a split costs less than it spares others.")
    if len(paying) == len(lengths):
        why = "A split of any of these lengths can pay here, depending on the load: let the router decide per request."
    else:
        shown = ", ".join(f"{tokens:,}" for tokens in paying)
        why = f"Splits of {shown} tokens can pay here, the others do not: let the router decide per request."
    return Verdict(answer="split some requests", why=why)


def longest_chunk(setting: Setting, prompt_tokens: int, cached: int = 0) -> int | None:
    """Return the longest chunk (a multiple of 64 tokens) with s(R, c) within the gap's SLO; None when there is none."""
    engine, streams = setting.engine, setting.load.streams_per_gpu
    top = min(engine.budget, -(-(prompt_tokens - cached) // MIN_CHUNK) * MIN_CHUNK)
    for chunk in range(top, 0, -MIN_CHUNK):
        if engine.gap_s(streams, chunk, prompt_tokens, cached) <= setting.slo.itl_p99_s:
            return chunk
    return None


def _never(setting: Setting, terms: Terms, chunk: int | None, *, missed: bool) -> LengthVerdict:
    flips = link_for(setting, terms, _allowed_s(setting, terms))
    streams = None if missed else _streams_that_pay(setting, terms)
    if missed:
        why = (
            f"Its TTFT would be {show_seconds(terms.ttft_split_s[0])} at best, over the SLO of "
            f"{show_seconds(setting.slo.ttft_s)}; unsplit it is {show_seconds(terms.ttft_local_s)}."
        )
    else:
        why = (
            f"Its toll is {show_seconds(terms.toll_s[0])} at best and what it spares others is worth "
            f"{show_seconds(terms.bought_s)}."
        )
        if streams is not None and flips is None:
            why += f" It would take {streams:.0f} streams on each GPU."
    answer: Answer = "never"
    if terms.gap_s > setting.slo.itl_p99_s and chunk is not None:
        answer = "chunked prefill is enough"
        why += f" Chunks of {chunk} tokens keep every gap within {show_seconds(setting.slo.itl_p99_s)}."
    return LengthVerdict(
        answer=answer, why=why, chunk_tokens=chunk, flips_at_bytes_per_s=flips, flips_with_streams_per_gpu=streams
    )


def _saturated(setting: Setting, alone: LengthVerdict, offered_bytes_per_s: float) -> LengthVerdict:
    why = (
        f"Splitting all of them would put {show_rate(offered_bytes_per_s)} on a link that carries "
        f"{show_rate(setting.link.high)} at best: transfers would queue without end."
    )
    paying = alone.answer in ("sometimes", "always")
    flips = offered_bytes_per_s if paying else alone.flips_at_bytes_per_s
    return msgspec.structs.replace(
        alone,
        answer="never" if paying else alone.answer,
        why=why if paying else f"{alone.why} {why}",
        flips_at_bytes_per_s=None if flips is None else max(flips, offered_bytes_per_s),
        offered_bytes_per_s=offered_bytes_per_s,
    )


def _do_not_split(setting: Setting, lengths: Sequence[tuple[Terms, LengthVerdict]]) -> Verdict:
    flips = [verdict.flips_at_bytes_per_s for _, verdict in lengths if verdict.flips_at_bytes_per_s]
    break_even = [terms.break_even_bytes_per_s for terms, _ in lengths]
    full = [verdict.offered_bytes_per_s for _, verdict in lengths if verdict.offered_bytes_per_s >= setting.link.high]
    if len(full) == len(lengths):
        return Verdict(
            answer="do not split",
            why=f"At the given rate the KV of any one length is more than {setting.link.name} carries, "
            f"{show_rate(setting.link.high)} at best: it would take {show_rate(min(full))}.",
            flips_at_bytes_per_s=min(flips) if flips else None,
        )
    why = (
        f"At no length does a split spare others what it costs: the link carries {show_rate(setting.link.low)}, "
        f"prefill makes KV at {show_rate(min(break_even))}"
    )
    if flips:
        why += f" or more, and the first split would pay at {show_rate(min(flips))}."
        return Verdict(answer="do not split", why=why, flips_at_bytes_per_s=min(flips))
    why += " or more, and at this load no link makes a split pay: prefills are short, or streams beside them few."
    return Verdict(answer="do not split", why=why)


def _allowed_s(setting: Setting, terms: Terms) -> float:
    """Return the toll that would still pay."""
    return min(terms.bought_s, setting.slo.ttft_s - terms.prefill_s)


def _streams_that_pay(setting: Setting, terms: Terms) -> float | None:
    one = bought_s(setting, terms.stall_s, streams=1.0)
    return terms.toll_s[0] / one if one > 0 else None


def _interval(pair: tuple[float, float]) -> str:
    best, worst = pair
    return show_seconds(best) if worst <= best * 1.005 else f"{show_seconds(best)} to {show_seconds(worst)}"
