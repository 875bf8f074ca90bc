"""Would a request have been split if its partners were there? What `on_no_prefill: fail` asks before it refuses.

The same rule is asked again about the fleet as it should be: every worker ready, with room for what nobody fetches, and
one more prefill and decode worker of each kind that there is, for when a role has left altogether. Nobody knows a link
to these, and they are too busy to be chosen for anything but a role that nobody else has.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tollbridge.policy.rules import Rule
from tollbridge.policy.views import FleetView, RequestView, WorkerView

_SOMEWHERE = ("nowhere", 1)
_BUSY_TOKENS = 1 << 40  # of prefill before ours


def would_split(rule: Rule, request: RequestView, fleet: FleetView) -> bool:
    """Return whether `rule` would split `request` for its price or on principle; not to learn something."""
    decision = rule(request, _complete(fleet))
    return decision.choice == "split" and decision.reason != "explore"


def _complete(fleet: FleetView) -> FleetView:
    workers = [
        msgspec.structs.replace(worker, ready=True, pinned_full=False, suspect=False, kv=worker.kv or _SOMEWHERE)
        for worker in fleet.workers
    ]
    return FleetView(workers=(*workers, *_understudies(workers)), pricing=fleet.pricing)


def _understudies(workers: list[WorkerView]) -> Iterator[WorkerView]:
    for connector, revision in sorted({worker.kind for worker in workers}):
        for role in ("prefill", "decode"):
            yield WorkerView(
                name=f"({role} {connector} {revision})",
                prefer=role,
                connector=connector,
                revision=revision,
                kv=_SOMEWHERE,
                waiting_prefill_tokens=_BUSY_TOKENS,
                num_prefills=_BUSY_TOKENS,
            )
