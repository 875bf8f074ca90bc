"""Sequences for tests, and a step without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from zlib import crc32

from tollbridge.kv.hashes import HashChain
from tollbridge.kv.pool import BlockPool
from tollbridge.sched.scheduler import Schedule, Scheduler
from tollbridge.sched.sequence import TokenSequence

BLOCK_SIZE = 4


def make_sequence(
    name: str, prompt: Sequence[int], *, remote: bool = False, awaited: bool = False, priority: int = 0
) -> TokenSequence:
    return TokenSequence(
        request_id=name,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        chain=HashChain(BLOCK_SIZE),
        remote=remote,
        awaited=awaited,
        priority=priority,
    )


def make_scheduler(
    num_blocks: int = 16,
    *,
    max_num_batched_tokens: int = 16,
    max_num_seqs: int = 4,
    max_model_len: int = 1000,
    before_preempt: Callable[[TokenSequence], None] = lambda sequence: None,
) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks, BLOCK_SIZE),
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        before_preempt=before_preempt,
    )


def add(
    scheduler: Scheduler,
    name: str,
    length: int,
    *,
    start: int | None = None,
    remote: bool = False,
    awaited: bool = False,
    priority: int = 0,
) -> TokenSequence:
    """Add a sequence; without `start`, one whose prompt shares no prefix with another name's."""
    first = crc32(name.encode()) % 10_000 * 100 if start is None else start
    sequence = make_sequence(name, range(first, first + length), remote=remote, awaited=awaited, priority=priority)
    scheduler.add(sequence)
    return sequence


def step(scheduler: Scheduler) -> Schedule:
    """Schedule and commit; the drawn tokens are the lengths of their sequences."""
    schedule = scheduler.schedule()
    scheduler.check()
    if schedule.plan is not None:
        ends = [chunk.first_token + len(chunk.token_ids) for chunk in schedule.plan.chunks if chunk.needs_logits]
        scheduler.commit(schedule.plan, ends)
        scheduler.check()
    return schedule


def shape(schedule: Schedule) -> list[tuple[str, int, int]]:
    """The plan as (request, first token, number of tokens)."""
    if schedule.plan is None:
        return []
    return [(chunk.request_id, chunk.first_token, len(chunk.token_ids)) for chunk in schedule.plan.chunks]
