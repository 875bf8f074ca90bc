"""What one step computes: the message from the scheduler to the runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SequenceChunk:
    """Tokens [first_token, first_token + len(token_ids)) of one sequence; the KV of all earlier is cached."""

    request_id: str
    token_ids: Sequence[int]
    first_token: int  # position of token_ids[0]
    block_table: Sequence[int]  # covers first_token + len(token_ids) tokens
    needs_logits: bool  # the last token's logits are sampled from
    all_logits: bool = False  # those of every token are wanted, to score the prompt

    @property
    def num_rows(self) -> int:
        """Rows of logits that this chunk yields."""
        return len(self.token_ids) if self.all_logits else int(self.needs_logits)


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One forward pass over a mix of prefill chunks and decodes (a decode is a chunk of one token)."""

    chunks: Sequence[SequenceChunk]

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def num_rows(self) -> int:
        return sum(chunk.num_rows for chunk in self.chunks)
