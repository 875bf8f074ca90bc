"""From a policy's rule to the decision about one request: overrides, fallbacks and retries."""

from __future__ import annotations

from typing import Literal

import msgspec

from tollbridge.errors import UnavailableError
from tollbridge.policy import registry
from tollbridge.policy.adaptive import priced
from tollbridge.policy.rules import NO_PARTNER, least_loaded
from tollbridge.policy.views import FleetView, RequestView
from tollbridge.policy.wanted import would_split
from tollbridge.wire.decision import Decision

# Why a split ended although prefill was complete (stock connectors of vLLM). The codes are metric labels.
_NO_KV = {
    "no_handover": "prefill answered no kv_transfer_params, as if vLLM ran without the connector of the cluster file",
    "prefill_restarted": "the connector has restarted since decode was told where it listens",
    "kv_never_came": "prefill was complete, but its KV did not reach decode",
}


def decide(
    request: RequestView,
    fleet: FleetView,
    policy: str,
    override: str | None = None,
    *,
    on_no_prefill: Literal["local", "fail"] = "local",
) -> Decision:
    """Return where `request` runs.

    `override` names the policy that the client asked for. Raises ConfigError for an unknown policy, UnavailableError
    when no worker is ready or when a split was wanted, is impossible for want of a partner, and `on_no_prefill` says
    to fail.
    """
    name = override or policy
    rule = registry.find(name)
    decision = rule(request, fleet)
    if "ttft_s" not in decision.terms:
        decision = priced(decision, request, fleet)
    if decision.reason in NO_PARTNER and on_no_prefill == "fail" and would_split(rule, request, fleet):
        raise UnavailableError(f'{decision.why.partition(":")[0]}, and on_no_prefill is "fail": try again later.')
    if override is not None and decision.reason == "policy":
        return msgspec.structs.replace(decision, reason="forced", why=f"The client asked for {override}.")
    return decision


def after_prefill_failure(failed: Decision, reason: str = "prefill_failed") -> Decision:
    """Return the retry of a split whose prefill leg failed before anything was relayed: alone on its decode worker.

    `reason` is "prefill_failed", "prefill_refused" when the worker did not like the request itself, or why decode could
    get no KV although prefill was complete.
    """
    what = _NO_KV.get(reason, "the prefill leg failed")
    return msgspec.structs.replace(
        failed,
        choice="local",
        prefill=None,
        transfer_id=None,
        reason=reason,
        why=f"On {failed.prefill} {what}: {failed.decode} serves it alone.",
        terms=_facts(failed, prompt_tokens="prompt_tokens", cached_tokens="decode_cached_tokens"),
    )


def after_break(failed: Decision, worker: str, num_tokens: int) -> Decision:
    """Return the decision about the rest of a stream that broke off after `num_tokens` tokens: on `worker`.

    That is the failed one where only the end was lost, which the router writes itself.
    """
    rest = "only its end was lost" if worker == failed.decode else f"{worker} continues"
    return msgspec.structs.replace(
        failed,
        choice="local",
        decode=worker,
        prefill=None,
        transfer_id=None,
        reason="continued",
        why=f"{failed.decode} broke off after {num_tokens} tokens: {rest}.",
        terms={},
    )


def after_decode_failure(failed: Decision, fleet: FleetView, tried: frozenset[str]) -> Decision:
    """Return the retry of a request whose decode worker failed before the first byte: alone on a worker not yet tried.

    Raises UnavailableError when there is none.
    """
    worker = least_loaded(fleet.without(tried).ready(), first="decode")
    return msgspec.structs.replace(
        failed,
        choice="local",
        decode=worker.name,
        prefill=None,
        transfer_id=None,
        reason="decode_failed",
        why=f"{failed.decode} failed before the first byte: {worker.name} serves it alone.",
        terms=_facts(failed, prompt_tokens="prompt_tokens"),
    )


def _facts(failed: Decision, **names: str) -> dict[str, float]:
    """Return the terms that are still true, new name to old: those of the prompt, not what was predicted."""
    return {new: failed.terms[old] for new, old in names.items() if old in failed.terms}
