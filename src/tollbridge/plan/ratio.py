"""How many of the GPUs should prefill: both sides of the cluster equally busy, and the link not the busiest."""

from __future__ import annotations

import msgspec

from tollbridge.config.cluster import SloConfig
from tollbridge.plan.terms import Engine

MAX_STREAMS = 256


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs by role for a rate of requests. Fractions are what the work needs, whole ones what to start with."""

    requests_per_s: float
    prefill_needed: float
    decode_needed: float
    link_use: float  # of one prefill worker's goodput, at its share of the rate
    prefill: int
    decode: int
    streams_per_decode: int  # that keep TPOT within its SLO
    ttft_queue_s: float | None  # mean wait for prefill at that split, M/D/1 (DistServe); None: more than it can do


def ratio_of(
    engine: Engine,
    slo: SloConfig,
    *,
    gpus: int,
    requests_per_s: float,
    prefill_s: float,
    output_tokens: int,
    kv_bytes: int,
    goodput_bytes_per_s: float,
) -> Ratio:
    """Return the split of `gpus` whose roles are most equally loaded; at least one each."""
    streams = streams_within(engine, slo.tpot_s)
    prefill_needed = requests_per_s * prefill_s
    decode_needed = requests_per_s * output_tokens * engine.decode_s(streams) / streams
    total = prefill_needed + decode_needed
    wanted = gpus * prefill_needed / total if total > 0 else gpus / 2
    prefill = min(max(round(wanted), 1), max(gpus - 1, 1))
    share = requests_per_s / prefill
    return Ratio(
        requests_per_s=requests_per_s,
        prefill_needed=prefill_needed,
        decode_needed=decode_needed,
        link_use=share * kv_bytes / goodput_bytes_per_s,
        prefill=prefill,
        decode=max(gpus - prefill, 1),
        streams_per_decode=streams,
        ttft_queue_s=_wait_s(share, prefill_s),
    )


def streams_within(engine: Engine, tpot_s: float) -> int:
    """Return the most streams whose step keeps TPOT within its SLO, at least 1."""
    if engine.per_decode_s <= 0:
        return MAX_STREAMS
    return min(max(int((tpot_s - engine.step_s) / engine.per_decode_s), 1), MAX_STREAMS)


def _wait_s(rate: float, service_s: float) -> float | None:
    use = rate * service_s
    return None if use >= 1 else service_s * use / (2 * (1 - use))
