"""One request on one simulated worker, from `submit` to its end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tollbridge.kv.hashes import HashChain
from tollbridge.sched.sequence import TokenSequence
from tollbridge.sim.transfer import Transfer

Role = Literal["local", "prefill", "decode"]


class Listener(Protocol):
    """Who sent the job. Called between steps; must not call the worker back at once."""

    def first_token(self, job: Job) -> None: ...

    def ended(self, job: Job) -> None: ...

    def failed(self, job: Job) -> None: ...


@dataclass(eq=False, slots=True, kw_only=True)
class Job:
    """`num_output` tokens are generated. Times are simulated seconds."""

    role: Role
    sequence: TokenSequence
    num_output: int
    listener: Listener
    transfer: Transfer | None = None
    arrival_s: float = 0.0
    scheduled_s: float | None = None  # it got its blocks
    can_compute_s: float | None = None
    first_token_s: float | None = None
    cached_tokens: int = 0
    loaded_tokens: int = 0
    segment: int | None = None  # the worker's step that gave the first token of an unbroken run
    token_times: array[float] = field(default_factory=lambda: array("d"))  # filled in at the end, and at breaks

    @property
    def num_generated(self) -> int:
        return self.sequence.num_tokens - self.sequence.num_prompt_tokens


def make_job(
    request_id: str,
    prompt: Sequence[int],
    num_output: int,
    listener: Listener,
    *,
    block_size: int,
    role: Role = "local",
    transfer: Transfer | None = None,
    veto_tokens: int = 0,
) -> Job:
    """Return a job that no worker has seen yet."""
    sequence = TokenSequence(
        request_id=request_id,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        chain=HashChain(block_size),
        remote=role == "decode",
        awaited=role == "prefill",
        veto_tokens=veto_tokens,
    )
    return Job(role=role, sequence=sequence, num_output=num_output, listener=listener, transfer=transfer)
