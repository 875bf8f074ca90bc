"""One request as the scheduler sees it: tokens, blocks, and how far its KV has got."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from tollbridge.kv.hashes import HashChain
from tollbridge.sched.plan import SequenceChunk


class State(enum.Enum):
    """Where a sequence is.

    waiting ──> running ──> finished             a local one; preemption leads from running back to waiting
       └──> parked ──> ready ──> running        a remote one: its blocks are held while its KV comes over the wire;
                                                revoked, it leads from parked back to waiting, as a local one
    running, parked ──> pinned ──> finished     the request ended, a transfer still uses its blocks
    """

    WAITING = "waiting"
    PARKED = "parked"
    READY = "ready"  # its KV has come; it holds its blocks and waits for a place in the batch
    RUNNING = "running"
    PINNED = "pinned"
    FINISHED = "finished"


@dataclass(slots=True, kw_only=True, eq=False)
class TokenSequence:
    """Tokens of one request with their blocks. The scheduler owns every field from `state` on."""

    request_id: str
    token_ids: list[int]  # prompt, then generated tokens; only ever appended to
    num_prompt_tokens: int
    chain: HashChain
    remote: bool = False  # the KV of its prompt is to come from another worker; False once that was tried
    awaited: bool = False  # another worker waits for the KV of its prompt
    veto_tokens: int = 0  # a remote one that lacks no more computes them itself
    priority: int = 0  # the lower, the earlier
    scores_prompt: bool = False  # the logits of all its tokens are wanted, so none may come from the prefix cache
    state: State = State.WAITING
    order: int = -1  # of arrival
    block_table: list[int] = field(
        default_factory=list
    )  # replaced, never cleared: the sender may still read the old one
    num_computed: int = 0  # tokens whose KV is in memory
    num_computed_peak: int = 0  # the most it has been, over preemptions
    num_committed_blocks: int = 0  # blocks of the table that are in the prefix cache
    num_hit_tokens: int = 0  # tokens found in the prefix cache at the last admission
    num_overtakes: int = 0  # how often the other queue was served first while this one was at the head
    num_passed: int = 0  # how often a later one of higher priority was served first while this was the oldest

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_lacking(self) -> int:
        """Tokens that a remote sequence must load: all but the hits and the last, whose logits are needed."""
        return self.num_prompt_tokens - 1 - self.num_hit_tokens

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens to compute here before it generates (the next token); 0 for one that is decoding."""
        if self.remote or self.state is State.PARKED:
            return 1
        is_decoding = self.num_computed + 1 == self.num_tokens > self.num_prompt_tokens
        return 0 if is_decoding else self.num_tokens - self.num_computed

    def chunk(self, limit: int) -> SequenceChunk:
        """Return the next tokens to compute, at most `limit`."""
        first = self.num_computed
        last = min(first + limit, self.num_tokens)
        return SequenceChunk(
            request_id=self.request_id,
            token_ids=self.token_ids[first:last],
            first_token=first,
            block_table=self.block_table,
            needs_logits=last == self.num_tokens,
            all_logits=self.scores_prompt,
        )
