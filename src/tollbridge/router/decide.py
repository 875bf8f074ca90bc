"""② From the fleet as it is now to the decision about one request: builds the views, asks the policy."""

from __future__ import annotations

import re

import msgspec

from tollbridge.policy.decide import decide
from tollbridge.policy.views import RequestView
from tollbridge.router.context import Context
from tollbridge.router.ingress import Body, Call
from tollbridge.wire.decision import Decision

_LIST_OF_PROMPTS = re.compile(rb'\s*\[\s*["\[]')  # ["text", ...] or [[ids], ...]; [1, 2] is one prompt
_INTEGER = re.compile(rb"-?[0-9]{1,18}")
_SEVERAL = ("n", "best_of")


def decide_call(context: Context, call: Call) -> Decision:
    """Return where `call` runs.

    Raises ModelNotFoundError for a model nobody serves, UnavailableError when no worker can take it.
    """
    router = context.config.router
    fleet = msgspec.structs.replace(context.fleet.view(call.model), pricing=context.learner.pricing())
    return decide(request_view(call), fleet, router.policy, call.override, on_no_prefill=router.on_no_prefill)


def request_view(call: Call) -> RequestView:
    """Return what a policy may know of the request."""
    return RequestView(
        id=call.id,
        body_bytes=call.body_bytes,
        prompt_tokens=_num_token_ids(call.body),
        max_tokens=_maybe_int(call.body, "max_completion_tokens") or _maybe_int(call.body, "max_tokens"),
        unsplittable=_unsplittable(call.body),
    )


def _unsplittable(body: Body) -> str | None:
    """One transfer carries the KV of one prompt: the reason code when the request has more."""
    if any((_maybe_int(body, name) or 1) > 1 for name in _SEVERAL):
        return "several_choices"
    prompt = body.get("prompt")
    if prompt is None or not _LIST_OF_PROMPTS.match(prompt):
        return None
    return "prompt_list" if len(msgspec.json.decode(prompt, type=list[msgspec.Raw])) > 1 else None


def _num_token_ids(body: Body) -> int | None:
    """Return the length of a prompt given as one list of token ids, by its commas; None for text."""
    prompt = bytes(body.get("prompt", b""))
    if not prompt.lstrip().startswith(b"[") or _LIST_OF_PROMPTS.match(prompt):
        return None
    return prompt.count(b",") + 1 if prompt.strip(b"[] \t\r\n") else 0


def _maybe_int(body: Body, name: str) -> int | None:
    """Return a field that is a whole number of a sane size; None for anything else, which the worker refuses."""
    value = bytes(body.get(name, b""))
    return int(value) if _INTEGER.fullmatch(value) else None
