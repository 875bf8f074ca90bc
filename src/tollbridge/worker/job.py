"""One admitted request: everything that its answer needs, and nothing of HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tollbridge.engine.base import SamplingParams
from tollbridge.wire.params import Role, TransferParams
from tollbridge.wire.responses import ResponsesRequest
from tollbridge.worker.tools import ToolReader

Kind = Literal["completion", "chat", "generate", "response"]  # by the path: /v1/completions and so on


@dataclass(frozen=True, kw_only=True)
class Branch:
    """One choice of the answer: one sequence in the engine."""

    index: int  # of the choice: prompt by prompt, `n` of each
    engine_id: str  # unique in this process, also when a client reuses its x-request-id
    prompt_token_ids: list[int]
    sampling: SamplingParams
    transfer: TransferParams | None = None
    leader: int | None = None  # the choice of the same prompt that starts first; this one finds its KV in the cache
    echo: str | None = None  # text of the prompt, to begin the choice with
    tools: ToolReader | None = None  # reads the text; each branch has its own


@dataclass(frozen=True, kw_only=True)
class Job:
    request_id: str  # x-request-id
    id: str  # as bodies name it: "cmpl-…", "chatcmpl-…", "generate-tokens-…" or "resp_…"
    kind: Kind
    model: str
    branches: tuple[Branch, ...]
    cache_salt: str | None
    priority: int
    num_continued_tokens: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    tokens_as_ids: bool  # in log probabilities
    only_echoes: bool  # the prompt is the whole answer
    wants_report: bool
    created: int  # Unix seconds
    arrival_s: float  # monotonic seconds
    trace: Mapping[str, str] = field(default_factory=dict)  # of the router's leg, or the client's own
    response: ResponsesRequest | None = None  # of the kind "response": its answer repeats some of it

    @property
    def role(self) -> Role | Literal["local"]:
        return self.transfer.role if self.transfer is not None else "local"

    @property
    def transfer(self) -> TransferParams | None:
        return self.branches[0].transfer

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(branch.prompt_token_ids) for branch in self.branches if branch.leader is None)
