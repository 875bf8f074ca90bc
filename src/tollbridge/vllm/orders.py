"""What the scheduler's half of the connector tells the worker's half, once per engine step.

vLLM carries it inside its own scheduler output, from one of its processes to another.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class SendOrder:
    """A prefill request was queued whose KV another worker will ask for."""

    request_id: str
    transfer_id: str
    digest: bytes
    num_tokens: int  # of the prompt


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """After this step, prompt tokens [0, end_token) of a sending request are computed."""

    request_id: str
    block_table: tuple[int, ...]
    end_token: int


@dataclass(frozen=True, kw_only=True)
class LoadOrder:
    """A decode request lacks the KV of tokens [first_token, first_token + num_tokens).

    `num_tokens` 0 tells prefill that nothing is needed; nobody waits for the end of such a load.
    """

    request_id: str
    transfer_id: str
    host: str
    port: int  # of tensor parallel rank 0
    digest: bytes
    first_token: int
    num_tokens: int
    block_table: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ShedOrder:
    """Finished sends hold more blocks than they may, or than others can wait for: give up what nobody fetches.

    See `KVSender.shed`.
    """

    transfer_ids: tuple[str, ...]  # finished sends, oldest first
    max_blocks: int
    unsent_too: bool


@dataclass(kw_only=True)
class StepOrders:
    """One step. Ids are vLLM's request ids. The worker takes the fields in this order."""

    rewinds: list[str] = field(default_factory=list)  # preempted: their blocks are about to be overwritten
    sends: list[SendOrder] = field(default_factory=list)
    send_cancels: list[tuple[str, str]] = field(default_factory=list)  # (id, one sentence)
    send_closes: list[str] = field(default_factory=list)  # the request ended: report the end of its send
    shed: ShedOrder | None = None
    load_cancels: list[tuple[str, str]] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    is_idle: bool = False  # nothing is computed in this step: the engine only asks whether something has ended

    def __bool__(self) -> bool:
        """Return whether there is anything to do."""
        return any(value for name, value in vars(self).items() if name != "is_idle")
