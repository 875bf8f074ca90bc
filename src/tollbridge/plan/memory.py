"""The memory limit of a worker: with a bounded ring, and with a transport that stages whole requests in host memory."""

from __future__ import annotations

import msgspec

from tollbridge.plan.inputs import MIB

MARGIN = 0.15  # of everything: allocator fragmentation, page tables, what nobody counted


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes. `limit` is what the user set, None when nothing was."""

    process: float
    process_is_assumed: bool
    shm: float
    ring: float
    request_kv: int
    staged: float  # concurrency x request x copies: what a transport without a bound holds, if it frees at once
    needed: float  # with our ring, margin included
    needed_unbounded: float  # with such a transport, margin included
    limit: float | None = None
    fits: bool | None = None
    fits_unbounded: bool | None = None
    requests_until_killed: int | None = None  # when such a transport frees nothing in time


DEFAULT_PROCESS_BYTES = 2560 * MIB  # a vLLM worker that serves nothing; measure yours


def memory_of(
    *,
    process: float | None,
    shm: float,
    ring: float,
    request_kv: int,
    concurrency: int,
    staging_copies: float,
    limit: float | None,
) -> Memory:
    """Return the memory of a worker whose requests have `request_kv` bytes of KV each."""
    base = (DEFAULT_PROCESS_BYTES if process is None else process) + shm
    each = request_kv * staging_copies
    staged = concurrency * each
    needed = (base + ring) * (1 + MARGIN)
    unbounded = (base + staged) * (1 + MARGIN)
    room = None if limit is None else max(limit - base, 0.0)
    return Memory(
        process=base - shm,
        process_is_assumed=process is None,
        shm=shm,
        ring=ring,
        request_kv=request_kv,
        staged=staged,
        needed=needed,
        needed_unbounded=unbounded,
        limit=limit,
        fits=None if limit is None else needed <= limit,
        fits_unbounded=None if limit is None else unbounded <= limit,
        requests_until_killed=None if room is None or not each else int(room // each) + 1,
    )
