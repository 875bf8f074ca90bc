"""One admitted request: everything that its answer needs, and nothing of HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tollbridge.engine.base import SamplingParams
from tollbridge.wire.params import Role, TransferParams
from tollbridge.worker.tools import ToolReader


@dataclass(frozen=True, kw_only=True)
class Job:
    request_id: str  # x-request-id
    id: str  # as OpenAI's bodies name it: "cmpl-…" or "chatcmpl-…"
    engine_id: str  # unique in this process, also when a client reuses its x-request-id
    kind: Literal["completion", "chat"]
    model: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    transfer: TransferParams | None
    cache_salt: str | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    tools: ToolReader | None  # reads the answer; each job has its own
    wants_report: bool
    created: int  # Unix seconds
    arrival_s: float  # monotonic seconds

    @property
    def role(self) -> Role | Literal["local"]:
        return self.transfer.role if self.transfer is not None else "local"
