"""What the page and `tollbridge top` are told: one struct, whole each time, so who misses some loses nothing.

Units are in the names; times of day are Unix seconds. No prompt, output or key is in it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tollbridge.wire.decision import Choice

VERSION = 1
Phase = Literal["prefill", "transfer", "decode", "ended"]
Level = Literal["bad", "warn", "note"]


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence for a person. `code` names its kind, `subject` the worker or link it is about."""

    level: Level
    code: str
    text: str
    subject: str = ""


class RequestRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One decision and what became of it, in short; `/decisions/{id}` has all of it."""

    id: str
    at: float  # of the decision
    choice: Choice
    policy: str
    reason: str
    why: str
    decode: str
    status: Literal["running", "ok", "error", "cancelled"]
    phase: Phase
    prefill: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of these, in the prefix cache of the worker that computes the prompt
    completion_tokens: int = 0
    queue_s: float = 0.0
    ttft_s: float | None = None  # from arrival, the wait for a place included
    predicted_ttft_s: float | None = None
    tpot_s: float | None = None
    longest_gap_s: float | None = None
    total_s: float | None = None
    lacked_tokens: int = 0  # that the decode worker lacks; in a split they cross the link
    toll_s: float | None = None  # of a split
    prefill_s: float | None = None  # measured; a local prefill stops those who decode beside it for as long
    avoided_s: float | None = None  # of a split: what it spared others
    kv_bytes: int = 0
    verified: bool | None = None
    in_slo: bool | None = None
    error: str = ""


class Transfers(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One side's transfers, as the worker counts them since its start."""

    active: int = 0
    done: int = 0
    cancelled: int = 0
    failed: int = 0
    payload_bytes: int = 0
    goodput_bytes_per_s: float = 0.0
    failures_by_reason: dict[str, int] = {}


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker."""

    name: str
    prefer: str
    engine: str
    host: str
    ready: bool
    suspect: bool = False
    detail: str = ""  # why it is not ready
    can_send: bool = False  # whether it may be the prefill side of a split
    num_prefills: int = 0  # legs of this router
    num_decodes: int = 0
    num_served: int = 0
    num_running: int = 0  # streams, also of other routers
    waiting_prefill_tokens: int = 0
    kv_total_tokens: int = 0  # 0: not known
    kv_used_tokens: int = 0
    pinned_tokens: int = 0  # finished KV that nobody has fetched yet
    max_pinned_tokens: int = 0
    pinned_full: bool = False
    cache_queried_tokens: int = 0  # looked up in its prefix cache, since its start
    cache_hit_tokens: int = 0
    rss_bytes: int = 0  # 0: not known
    memory_limit_bytes: int = 0
    send: Transfers = Transfers()
    receive: Transfers = Transfers()


class LinkRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The way from one prefill to one decode worker."""

    prefill: str
    decode: str
    goodput_bytes_per_s: float | None = None  # as measured between their hosts; None: not yet
    num_transfers: int = 0  # under way, of this router
    recent_bytes_per_s: float = 0.0  # KV that has crossed lately
    use: float | None = None  # of the goodput, 0 to 1


class Window(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What ended in the last seconds."""

    seconds: float
    num_ended: int = 0
    slo_share: float | None = None  # of these, as far as a sample says
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    tpot_p50_s: float | None = None
    tpot_p95_s: float | None = None
    gap_p95_s: float | None = None  # of the longest gap of each stream


class Totals(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counters since the router started: the same objects that `/metrics` shows."""

    requests: int = 0  # ended
    split: int = 0
    local: int = 0
    in_slo: int = 0
    errors: int = 0
    cancelled: int = 0
    refused: int = 0
    by_reason: dict[str, int] = {}
    verified: int = 0
    unverified: int = 0
    unverified_by_reason: dict[str, int] = {}
    retries: int = 0
    continued: int = 0
    kv_bytes: int = 0
    wire_s: float = 0.0
    toll_s: float = 0.0
    avoided_s: float = 0.0
    cached_tokens: int = 0
    cacheable_tokens: int = 0


class BreakEven(msgspec.Struct, frozen=True, kw_only=True):
    """What a prompt of so many tokens stalls a neighbour if local, and adds to itself if split."""

    prefill: str
    decode: str
    num_tokens: list[int]
    stall_s: list[float]
    toll_s: list[float]
    tokens_at_par: int | None  # from here on a split spares one stream more than it costs; None: nowhere shown


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is used up, and how much of it there may be."""

    name: str
    used: float
    limit: float
    unit: Literal["bytes", "requests", "blocks"]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the page shows, at one instant."""

    v: int
    at: float
    started_at: float
    model: str
    policy: str
    explore: float
    slo_ttft_s: float
    slo_tpot_s: float
    slo_itl_s: float
    in_flight: int
    waiting: int
    arrivals_per_s: float
    workers: list[WorkerRow]
    links: list[LinkRow]
    window: Window
    totals: Totals
    break_even: BreakEven | None
    bounds: list[Bound]
    alerts: list[Alert]
    active: list[RequestRow]  # running now, oldest first, bounded
    recent: list[RequestRow]  # ended, newest first, bounded
    bias: dict[str, float]  # (predicted - real) / real, averaged, by what is predicted


class History(msgspec.Struct, frozen=True, kw_only=True):
    """What a viewer is told first: requests that ended before it came, oldest first."""

    v: int
    at: float
    rows: list[RequestRow]
