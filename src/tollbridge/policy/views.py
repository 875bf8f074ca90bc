"""What a policy sees: one request and the fleet at one instant. Frozen; the caller builds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from tollbridge.policy.pricing import Pricing

_BYTES_PER_TOKEN = 4

Prefer = Literal["prefill", "decode", "any"]


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, as the router knows it now."""

    name: str
    prefer: Prefer = "any"  # a hint: the role is per request
    ready: bool = True
    connector: str = "tollbridge"  # how it moves KV; both workers of a split have the same
    revision: str = ""  # of model, engine and settings; the same
    kv: tuple[str, int] | None = None  # where decode workers fetch KV; None: with our connector no prefill worker
    pinned_full: bool = False  # it holds as much KV that nobody has fetched as it may: no new splits with it
    suspect: bool = False  # a request failed here a moment ago; used only when nobody else is at hand
    num_prefills: int = 0  # prefill legs in flight
    num_decodes: int = 0  # decode legs and local requests in flight
    num_served: int = 0  # requests since start, to spread equal load
    host: str = ""  # the machine, as `links` of the cluster file names it
    block_size: int = 16  # tokens
    kv_bytes_per_token: float = 0.0  # 0: not known
    max_num_batched_tokens: int = 0  # token budget of a step, 0: not known
    waiting_prefill_tokens: int = 0  # uncached prompt tokens that wait or are being computed there
    num_running: int = 0  # streams decoding there, also those that others sent, and the prefill legs in flight
    free_kv_tokens: int | None = None  # room in its KV cache; None: not known
    used_kv_tokens: int = 0  # of its KV cache, by running requests; what is merely cached is free
    pinned_tokens: int = 0  # finished KV that nobody has fetched yet
    num_sending: int = 0  # transfers in flight out of it, and the bytes still to go
    sending_bytes: float = 0.0
    num_receiving: int = 0  # transfers in flight into it, and the bytes still to come
    receiving_bytes: float = 0.0

    @property
    def num_in_flight(self) -> int:
        return self.num_prefills + self.num_decodes

    @property
    def kind(self) -> tuple[str, str]:
        """What both workers of a split have in common."""
        return self.connector, self.revision

    @property
    def can_send(self) -> bool:
        """Whether it can be a prefill worker: a stock connector says with each answer where its KV is."""
        return self.kv is not None or self.connector != "tollbridge"

    def can_send_to(self, other: WorkerView) -> bool:
        """Return whether the two can share a split, this one prefilling."""
        return self.can_send and self.name != other.name and self.kind == other.kind


class FleetView(msgspec.Struct, frozen=True, kw_only=True):
    """Every worker that serves the request's model, ready or not."""

    workers: tuple[WorkerView, ...]
    pricing: Pricing = msgspec.field(default_factory=Pricing)

    def ready(self) -> list[WorkerView]:
        """Return the workers that can serve now."""
        return [worker for worker in self.workers if worker.ready]

    def without(self, names: frozenset[str]) -> FleetView:
        """Return the fleet less the named workers."""
        kept = tuple(worker for worker in self.workers if worker.name not in names)
        return FleetView(workers=kept, pricing=self.pricing)


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `cached` is a hint, never truth: a worker may have lost what the index remembers."""

    id: str
    body_bytes: int = 0
    prompt_tokens: int | None = None  # None: the prompt is text, and nobody has tokenised it
    max_tokens: int | None = None
    cached: Mapping[str, int] = {}  # worker name -> leading prompt tokens in its prefix cache; absent: 0
    session: str | None = None  # requests of one session are better off on one worker
    home: str | None = None  # the worker that served the session last
    priority: int = 0  # lower is served earlier, as vLLM has it
    unsplittable: str | None = None  # a reason code of `rules.NOT_SPLIT` when one transfer cannot carry it


def prompt_tokens(request: RequestView) -> int:
    """Return the length of the prompt, guessed from the body where nobody has tokenised it."""
    return request.body_bytes // _BYTES_PER_TOKEN if request.prompt_tokens is None else request.prompt_tokens
