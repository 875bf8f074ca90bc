"""What a decision asks of each worker: the tokens to compute, the room for KV, and what has to cross."""

from __future__ import annotations

from typing import TypedDict

from tollbridge.router.fleet import Leg
from tollbridge.wire.decision import Decision


class Work(TypedDict):
    """The arguments of `Fleet.serving`."""

    prefill_tokens: int
    kv_tokens: int


def work_of(decision: Decision, leg: Leg) -> Work:
    """Return what `leg` means for its worker; nothing where the prompt's tokens are not known."""
    num_tokens = int(decision.terms.get("prompt_tokens", 0))
    loads = leg == "decode" and decision.choice == "split"
    cached = int(decision.terms.get("decode_cached_tokens" if loads else "cached_tokens", 0))
    missing = max(num_tokens - cached, 0)
    return Work(prefill_tokens=min(missing, 1) if loads else missing, kv_tokens=missing)


def tokens_to_move(decision: Decision) -> int:
    """Return the tokens whose KV crosses in a split: decode computes the last one itself."""
    num_tokens = int(decision.terms.get("prompt_tokens", 0))
    return max(num_tokens - 1 - int(decision.terms.get("decode_cached_tokens", 0)), 0)
