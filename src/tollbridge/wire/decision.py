"""The decision about one request and what then really happened: header, `/decisions`, logs and dashboard share it."""

from __future__ import annotations

from typing import Literal

import msgspec

from tollbridge.wire.params import WorkerReport

Choice = Literal["local", "split"]


class Decision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where one request runs, and why. `terms` holds every figure that went into it, by name with its unit."""

    id: str  # request id, also the client's x-request-id
    policy: str  # the rule that decided: "local", "split", "adaptive", ...
    choice: Choice
    decode: str  # worker name; for a local request the one that does both
    prefill: str | None = None  # worker name, None for local
    reason: str  # a short code, a metric label: "forced", "policy", "no_ready_prefill", ...
    why: str  # one sentence for a person
    transfer_id: str | None = None
    terms: dict[str, float] = {}
    tokens_from: str | None = None  # how the prompt's tokens were found: "ids", "tokenizer", "worker", "text", "none"


class Happened(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What really happened to one request; filled in as it goes."""

    status: Literal["running", "ok", "error", "cancelled"] = "running"
    http_status: int = 0
    error: str = ""
    tenant: str = ""
    queue_s: float = 0.0  # waited for a place in the router
    ttft_s: float | None = None  # from the decision, as `total_s`: the wait for a place comes on top
    total_s: float | None = None
    longest_gap_s: float | None = None  # between two pieces of a stream
    prompt_tokens: int = 0
    cached_tokens: int | None = None  # of the prompt, found by the worker that answered before any transfer
    completion_tokens: int = 0  # of all choices
    num_choices: int = 1  # asked for, of all prompts together
    continued_at: list[int] = []  # tokens generated before each continuation on another worker
    split_verified: bool | None = None  # split only: decode really loaded the KV that it lacked
    prefill_report: WorkerReport | None = None
    decode_report: WorkerReport | None = None
    errors: dict[str, float] = {}  # (predicted - real) / real, by what was predicted: ttft, prefill, wire, step


class DecisionRecord(msgspec.Struct, kw_only=True):
    """One entry of `/decisions/{id}`."""

    at: float  # Unix seconds
    decision: Decision
    happened: Happened
