"""The pure schemes: always local, always split. Each rule is a function `(RequestView, FleetView) -> Decision`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tollbridge.errors import UnavailableError
from tollbridge.policy.home import home_of
from tollbridge.policy.views import FleetView, RequestView, WorkerView
from tollbridge.wire.decision import Decision

Rule = Callable[[RequestView, FleetView], Decision]
Partners = list[tuple[WorkerView, list[WorkerView]]]

# Why a split that was wanted did not happen, and the sentence that says so. The codes are metric labels.
NOT_SPLIT: dict[str, str] = {
    "no_ready_prefill": "No prefill worker is ready",
    "pinned_bound": "Every ready prefill worker holds as much unfetched KV as it may",
    "no_ready_decode": "No decode worker is ready beside the prefill worker",
    "connectors_differ": "No ready decode worker has the connector of a ready prefill worker",
    "revisions_differ": "No ready decode worker has the revision of a ready prefill worker",
    "prompt_list": "Several prompts in one request cannot share one transfer",
    "several_choices": "Several choices (n > 1) cannot share one transfer of vLLM's own connectors",
    "multimodal": "The KV of images, audio and video is not shipped",
    "lora_adapter": "The KV of a LoRA adapter is not shipped",
    "prompt_embeds": "A prompt of embeddings has no token ids to name its KV by",
    "prompt_logprobs": "Log probabilities of the prompt make the decode worker compute all of it",
    "no_kv_room": "No decode worker has room for its KV",
    "unknown_link": "Nobody has seen what the links carry",
}
NO_PARTNER = frozenset(
    {"no_ready_prefill", "pinned_bound", "no_ready_decode", "connectors_differ", "revisions_differ"}
)  # what `on_no_prefill: fail` refuses


def local(request: RequestView, fleet: FleetView) -> Decision:
    """Serve on the least loaded ready worker, whatever it prefers: a rival of splitting must use all of them alike."""
    worker = least_loaded(fleet.ready(), first=None, request=request)
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
    chosen = pair(request, fleet)
    if isinstance(chosen, str):
        return not_split(request, fleet, chosen)
    prefill, decode = chosen
    return Decision(
        id=request.id,
        policy="split",
        choice="split",
        decode=decode.name,
        prefill=prefill.name,
        reason="policy",
        why=f"The policy splits every request; {prefill.name} and {decode.name} have the fewest in flight.",
    )


def partners(request: RequestView, fleet: FleetView) -> Partners | str:
    """Return who may prefill, each with who may decode for it, or the code of why nobody may."""
    if request.unsplittable is not None:
        return request.unsplittable
    senders = _by_preference(fleet, "prefill", _can_send)
    if not senders:
        return "no_ready_prefill"
    senders = [worker for worker in senders if not worker.pinned_full]
    if not senders:
        return "pinned_bound"
    able = {kind: _by_preference(fleet, "decode", _is_of(kind)) for kind in {worker.kind for worker in senders}}
    found = [(sender, receivers) for sender in senders if (receivers := _others(able[sender.kind], sender))]
    if found:
        return found
    return _difference(senders, fleet)


def pair(request: RequestView, fleet: FleetView) -> tuple[WorkerView, WorkerView] | str:
    """Return the prefill and the decode worker with the least before them, or the code of why there are none."""
    found = partners(request, fleet)
    if isinstance(found, str):
        return found
    prefill = least_loaded([sender for sender, _ in found], first="prefill", request=request)
    receivers = next(receivers for sender, receivers in found if sender is prefill)
    return prefill, least_loaded(receivers, first="decode", request=request)


def least_loaded(workers: Iterable[WorkerView], *, first: str | None, request: RequestView | None = None) -> WorkerView:
    """Return the worker with the fewest requests in flight; UnavailableError when there is none.

    With a `request` whose length is known, the one with the least prefill before it: what waits there, and what of
    the prompt it has not cached, in the prompt's own size, count as requests in flight do. A suspect comes last. Ties
    go to the home of the request's session, then to a worker that prefers `first` (None: no matter), then to the one
    that served least.
    """
    workers = list(workers)
    home = home_of(request, workers) if request is not None else None
    num_tokens = (request.prompt_tokens or 0) if request is not None else 0

    def load(worker: WorkerView) -> float:
        if request is None or not num_tokens:
            return worker.num_in_flight
        uncached = max(0, num_tokens - request.cached.get(worker.name, 0))
        return worker.num_in_flight + (worker.waiting_prefill_tokens + uncached) / num_tokens

    def rank(worker: WorkerView) -> tuple[bool, float, bool, bool, int, str]:
        return (
            worker.suspect,
            load(worker),
            worker.name != home,
            first is not None and worker.prefer != first,
            worker.num_served,
            worker.name,
        )

    ranked = sorted(workers, key=rank)
    if not ranked:
        raise UnavailableError("No worker is ready: see /health for what each one says, and try again.")
    return ranked[0]


def _can_send(worker: WorkerView) -> bool:
    return worker.can_send


def _others(workers: list[WorkerView], sender: WorkerView) -> list[WorkerView]:
    """Return `workers` less the sender, who is one of them only if they are what he prefers to be."""
    if workers and workers[0].prefer != sender.prefer:
        return workers
    return [worker for worker in workers if worker.name != sender.name]


def _is_of(kind: tuple[str, str]) -> Callable[[WorkerView], bool]:
    return lambda worker: worker.kind == kind


def _difference(senders: list[WorkerView], fleet: FleetView) -> str:
    """Return the code of why no ready worker can decode for any of `senders`."""
    others = _by_preference(fleet, "decode", lambda worker: worker.name != senders[0].name)
    if not others:
        return "no_ready_decode"
    connectors = {worker.connector for worker in senders}
    return "revisions_differ" if any(worker.connector in connectors for worker in others) else "connectors_differ"


def _by_preference(fleet: FleetView, role: str, able: Callable[[WorkerView], bool]) -> list[WorkerView]:
    """Return the ready workers that prefer `role`, or failing these the ones without a preference."""
    ready = fleet.ready()
    return [w for w in ready if w.prefer == role and able(w)] or [w for w in ready if w.prefer == "any" and able(w)]


def not_split(request: RequestView, fleet: FleetView, reason: str) -> Decision:
    """Serve alone what was to be split, and say why."""
    worker = least_loaded(fleet.ready(), first="decode", request=request)
    return Decision(
        id=request.id,
        policy="split",
        choice="local",
        decode=worker.name,
        reason=reason,
        why=f"{NOT_SPLIT[reason]}: {worker.name} serves it alone.",
    )
