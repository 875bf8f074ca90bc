"""What a split of one prompt costs and buys, on one link: the terms that a verdict is made of.

For a prompt of n tokens with x bytes of KV, prefill time T and a link of B bytes/s:

* the wire needs x/B; a transport that starts after prefill (NIXL's pull) makes the client wait for all of it,
* one that overlaps layer by layer for max(x/(K B), x/B - T (1 - 1/K)) only, K layers of chunks (`cost/toll.py`),
* what prefill has in its prefix cache leaves at once and crosses while the rest is computed,
* break-even, the rate at which the wire is as quick as prefill: x/T,
* it buys the streams beside it the time they would stand still: chunks of c tokens lengthen their steps.

What is bought is weighed as the router weighs it (`policy/adaptive.py`): a stream of o tokens that stands still for d
has its TPOT worse by d/o. Divided by its SLO and multiplied by that of TTFT it is in seconds of TTFT, like the toll.
"""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec

from tollbridge.config.cluster import SloConfig
from tollbridge.cost.toll import last_arrival_closed_s
from tollbridge.plan.inputs import Link
from tollbridge.plan.prefill import Prefill


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's speed."""

    prefill: Prefill
    step_s: float  # of a decode step, without what each stream adds
    per_decode_s: float
    budget: int  # tokens of a step
    uncertainty: float = 0.0  # relative, of a figure from the catalogue; 0: measured

    def decode_s(self, num_streams: float) -> float:
        """Return s(R, 0)."""
        return self.step_s + self.per_decode_s * num_streams

    def gap_s(self, num_streams: float, chunk: int, num_tokens: int, cached: int = 0) -> float:
        """Return the longest gap of a stream while a prompt is prefilled beside it in chunks: s(R, c).

        A mixed step reads the weights once for both, so the chunk hides the decode step or the step the chunk.
        """
        chunk = min(chunk, num_tokens - cached)
        chunk_s = self.prefill.seconds(num_tokens) - self.prefill.seconds(num_tokens - chunk)
        return self.per_decode_s * num_streams + max(self.step_s, chunk_s)

    def stall_s(self, num_tokens: int, chunk: int, cached: int = 0) -> float:
        """Return how much later each stream is for one such prefill, over all its chunks."""
        edges = [*range(cached, num_tokens, chunk), num_tokens]
        times = [self.prefill.seconds(edge) for edge in edges]
        return sum(max(after - before - self.step_s, 0.0) for before, after in pairwise(times))


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What runs at the same time."""

    concurrency: int  # requests in flight in all
    gpus: int  # they are spread over when nothing is split
    output_tokens: int

    @property
    def streams_per_gpu(self) -> float:
        return self.concurrency / self.gpus


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds unless named otherwise; pairs are (best, worst) over the link's interval."""

    prompt_tokens: int
    computed_tokens: int  # the others are in the prefix cache of whoever prefills
    kv_bytes: int
    prefill_s: float
    prefill_us_per_token: float
    wire_s: tuple[float, float]
    toll_s: tuple[float, float]  # our transfer: what shows of the wire, the one step that decode needs, the second leg
    toll_sequential_s: tuple[float, float]  # a transfer that begins when prefill has ended
    ttft_local_s: float
    ttft_split_s: tuple[float, float]
    ttft_burst_sequential_s: tuple[float, float]  # the last of `concurrency` prompts that arrive at once on one worker
    ttft_burst_split_s: tuple[float, float]
    gap_s: float  # longest gap of a stream beside this prefill, not split
    gap_split_s: float
    stall_s: float  # each stream beside it is later by
    bought_s: float  # all of them, in seconds of TTFT
    break_even_bytes_per_s: float


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change with the length of a prompt."""

    engine: Engine
    link: Link
    load: Load
    slo: SloConfig
    hop_s: float
    num_layers: int

    @property
    def fixed_s(self) -> float:
        """What a split costs on any link: the one-token step on decode and the second leg."""
        return self.engine.decode_s(self.load.streams_per_gpu) + self.hop_s


def terms_of(setting: Setting, prompt_tokens: int, kv_bytes: int, cached_tokens: int = 0) -> Terms:
    """Return the terms of one prompt length; `cached_tokens` are prefilled by nobody, but must cross the link."""
    engine, load, link = setting.engine, setting.load, setting.link
    cached = min(cached_tokens, prompt_tokens - 1)
    computed = prompt_tokens - cached
    prefill_s = engine.prefill.seconds(prompt_tokens) - engine.prefill.seconds(cached)
    best, worst = kv_bytes / link.high, kv_bytes / link.low
    fresh_bytes = kv_bytes * computed / prompt_tokens
    pieces = pieces_of(setting, computed)
    tolls = tuple(
        _visible_s(kv_bytes, fresh_bytes, rate, prefill_s, pieces) + setting.fixed_s for rate in (link.high, link.low)
    )
    step_s = engine.decode_s(load.streams_per_gpu)
    many = load.concurrency
    stall_s = engine.stall_s(prompt_tokens, engine.budget, cached)
    return Terms(
        prompt_tokens=prompt_tokens,
        computed_tokens=computed,
        kv_bytes=kv_bytes,
        prefill_s=prefill_s,
        prefill_us_per_token=1e6 * prefill_s / computed,
        wire_s=(best, worst),
        toll_s=(tolls[0], tolls[1]),
        toll_sequential_s=(best + setting.fixed_s, worst + setting.fixed_s),
        ttft_local_s=prefill_s,
        ttft_split_s=(prefill_s + tolls[0], prefill_s + tolls[1]),
        ttft_burst_sequential_s=(many * (prefill_s + best), many * (prefill_s + worst)),
        ttft_burst_split_s=(_burst_s(setting, many, prefill_s, best), _burst_s(setting, many, prefill_s, worst)),
        gap_s=engine.gap_s(load.streams_per_gpu, engine.budget, prompt_tokens, cached),
        gap_split_s=step_s,
        stall_s=stall_s,
        bought_s=bought_s(setting, stall_s),
        break_even_bytes_per_s=kv_bytes / prefill_s,
    )


def bought_s(setting: Setting, stall_s: float, streams: float | None = None) -> float:
    """Return what a split spares the streams of one GPU, in seconds of TTFT by the ratio of the SLOs."""
    load, slo = setting.load, setting.slo
    streams = load.streams_per_gpu if streams is None else streams
    return streams * (stall_s / load.output_tokens) / slo.tpot_s * slo.ttft_s


def pieces_of(setting: Setting, num_tokens: int) -> int:
    """Return K: layers of chunks."""
    return setting.num_layers * math.ceil(num_tokens / setting.engine.budget)


def link_for(setting: Setting, terms: Terms, allowed_s: float) -> float | None:
    """Return the slowest link whose toll is `allowed_s`, bytes/s; None when no link's is, for the fixed cost alone."""
    visible = allowed_s - setting.fixed_s
    if visible <= 0:
        return None
    pieces = pieces_of(setting, terms.computed_tokens)
    fresh_bytes = terms.kv_bytes * terms.computed_tokens / terms.prompt_tokens
    return max(
        fresh_bytes / (pieces * visible),
        fresh_bytes / (visible + terms.prefill_s * (1 - 1 / pieces)),
        terms.kv_bytes / (visible + terms.prefill_s),
    )


def _visible_s(kv_bytes: float, fresh_bytes: float, rate: float, prefill_s: float, pieces: int) -> float:
    """Return what shows of the wire: cached KV leaves at once, and what is computed layer by layer behind it."""
    arrived_s = last_arrival_closed_s(
        fresh_bytes, rate, compute_s=prefill_s, num_pieces=pieces, ready_bytes=kv_bytes - fresh_bytes
    )
    return max(arrived_s - prefill_s, 0.0)


def _burst_s(setting: Setting, many: int, prefill_s: float, wire_s: float) -> float:
    """Return when the last of `many` prompts has its first token: prefills in turn, transfers in turn behind them."""
    return max(many * prefill_s + wire_s / setting.num_layers, prefill_s / setting.num_layers + many * wire_s) + (
        setting.fixed_s
    )
