"""The pure schemes: always local, always split. Each rule is a function `(RequestView, FleetView) -> Decision`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tollbridge.errors import UnavailableError
from tollbridge.policy.views import FleetView, RequestView, WorkerView
from tollbridge.wire.decision import Decision

Rule = Callable[[RequestView, FleetView], Decision]

# Why a split that was wanted did not happen, and the sentence that says so. The codes are metric labels.
NOT_SPLIT: dict[str, str] = {
    "no_ready_prefill": "No prefill worker is ready",
    "pinned_bound": "Every ready prefill worker holds as much unfetched KV as it may",
    "no_ready_decode": "No decode worker is ready beside the prefill worker",
    "connectors_differ": "No ready decode worker has the connector of a ready prefill worker",
    "prompt_list": "Several prompts in one request cannot share one transfer",
    "several_choices": "Several choices (n > 1) cannot share one transfer",
}
NO_PARTNER = frozenset(
    {"no_ready_prefill", "pinned_bound", "no_ready_decode", "connectors_differ"}
)  # what `on_no_prefill: fail` refuses


def local(request: RequestView, fleet: FleetView) -> Decision:
    """Serve on the least loaded ready worker, whatever it prefers: a rival of splitting must use all of them alike."""
    worker = least_loaded(fleet.ready(), first=None)
    return Decision(
        id=request.id,
        policy="local",
        choice="local",
        decode=worker.name,
        reason="policy",
        why=f"The policy serves every request on one worker; {worker.name} has the fewest in flight.",
    )


def split(request: RequestView, fleet: FleetView) -> Decision:
    """Prefill on the least loaded prefill worker, decode on the least loaded other one; else local, saying why."""
    if request.unsplittable is not None:
        return _not_split(request, fleet, request.unsplittable)
    senders = _by_preference(fleet, "prefill", lambda worker: worker.can_send)
    if not senders:
        return _not_split(request, fleet, "no_ready_prefill")
    senders = [worker for worker in senders if not worker.pinned_full]
    if not senders:
        return _not_split(request, fleet, "pinned_bound")
    partners = {worker.name: _by_preference(fleet, "decode", worker.can_send_to) for worker in senders}
    paired = [worker for worker in senders if partners[worker.name]]
    if not paired:
        others = _by_preference(fleet, "decode", lambda worker: worker.name != senders[0].name)
        return _not_split(request, fleet, "connectors_differ" if others else "no_ready_decode")
    prefill = least_loaded(paired, first="prefill")
    decode = least_loaded(partners[prefill.name], first="decode")
    return Decision(
        id=request.id,
        policy="split",
        choice="split",
        decode=decode.name,
        prefill=prefill.name,
        reason="policy",
        why=f"The policy splits every request; {prefill.name} and {decode.name} have the fewest in flight.",
    )


def least_loaded(workers: Iterable[WorkerView], *, first: str | None) -> WorkerView:
    """Return the worker with the fewest requests in flight; UnavailableError when there is none.

    A suspect comes last. Ties go to a worker that prefers `first` (None: no matter), then to the one that served least.
    """

    def rank(worker: WorkerView) -> tuple[bool, int, bool, int, str]:
        return (
            worker.suspect,
            worker.num_in_flight,
            first is not None and worker.prefer != first,
            worker.num_served,
            worker.name,
        )

    ranked = sorted(workers, key=rank)
    if not ranked:
        raise UnavailableError("No worker is ready: see /health for what each one says, and try again.")
    return ranked[0]


def _by_preference(fleet: FleetView, role: str, able: Callable[[WorkerView], bool]) -> list[WorkerView]:
    """Return the ready workers that prefer `role`, or failing these the ones without a preference."""
    ready = [worker for worker in fleet.ready() if able(worker)]
    return [w for w in ready if w.prefer == role] or [w for w in ready if w.prefer == "any"]


def _not_split(request: RequestView, fleet: FleetView, reason: str) -> Decision:
    worker = least_loaded(fleet.ready(), first="decode")
    return Decision(
        id=request.id,
        policy="split",
        choice="local",
        decode=worker.name,
        reason=reason,
        why=f"{NOT_SPLIT[reason]}: {worker.name} serves it alone.",
    )
