"""Which rank sends which heads to which rank, when the two sides split a model's KV heads differently. Pure.

Tensor parallelism gives rank r of `tp_size` the r-th run of `num_kv_heads / tp_size` heads, and where there are more
ranks than heads, each head to `tp_size / num_kv_heads` neighbouring ranks (vLLM's rule, for one). So what one rank
sends another is one run of heads, and in a token-major cache two runs of bytes per token: one in K, one in V.

Different block sizes need no plan: frames carry token ranges, each side cuts them by its own blocks. Frames carry whole
tokens of equal size, so today the handshake refuses two sides of different `tp_size`; this is what lifts that needs.
"""

from __future__ import annotations

from typing import NamedTuple

from tollbridge.errors import HandshakeError


class HeadSlice(NamedTuple):
    """`num_heads` heads go from one rank to another; where they begin is counted within each rank."""

    send_rank: int
    receive_rank: int
    send_head: int
    receive_head: int
    num_heads: int


class Run(NamedTuple):
    """Bytes of one token that go from one place within it to another."""

    send_offset: int
    receive_offset: int
    num_bytes: int


def plan_heads(num_kv_heads: int, *, send_tp_size: int, receive_tp_size: int) -> tuple[HeadSlice, ...]:
    """Return the slices that give every receiving rank each of its heads exactly once, by receiving rank.

    `num_kv_heads` is the whole model's. Where several ranks hold the same head, the receiving ranks spread over them.
    HandshakeError when a side's degree and the heads do not divide.
    """
    for side, tp_size in (("prefill", send_tp_size), ("decode", receive_tp_size)):
        if tp_size <= 0 or (num_kv_heads % tp_size and tp_size % num_kv_heads):
            raise HandshakeError(
                f"KV heads do not divide: tp_size is {tp_size} on the {side} side and num_kv_heads is {num_kv_heads}: "
                "one must divide the other."
            )
    return tuple(
        piece
        for receive_rank in range(receive_tp_size)
        for piece in _slices_for(receive_rank, num_kv_heads, send_tp_size, receive_tp_size)
    )


def heads_of(rank: int, num_kv_heads: int, tp_size: int) -> range:
    """Return the heads that `rank` holds."""
    if tp_size > num_kv_heads:
        head = rank * num_kv_heads // tp_size
        return range(head, head + 1)
    size = num_kv_heads // tp_size
    return range(rank * size, (rank + 1) * size)


def token_runs(piece: HeadSlice, *, head_bytes: int, send_heads: int, receive_heads: int) -> tuple[Run, Run]:
    """Return what moves of each token, K and then V, between token-major caches of so many heads per rank."""
    size = piece.num_heads * head_bytes
    key = Run(piece.send_head * head_bytes, piece.receive_head * head_bytes, size)
    send_value, receive_value = send_heads * head_bytes, receive_heads * head_bytes
    return key, Run(key.send_offset + send_value, key.receive_offset + receive_value, size)


def _slices_for(receive_rank: int, num_kv_heads: int, send_tp_size: int, receive_tp_size: int) -> list[HeadSlice]:
    """Return what one receiving rank gets."""
    wanted = heads_of(receive_rank, num_kv_heads, receive_tp_size)
    num_copies = max(1, send_tp_size // num_kv_heads)
    pieces = []
    for send_rank in range(receive_rank % num_copies, send_tp_size, num_copies):  # one of each group of equal ranks
        held = heads_of(send_rank, num_kv_heads, send_tp_size)
        first, end = max(wanted.start, held.start), min(wanted.stop, held.stop)
        if first < end:
            pieces.append(HeadSlice(send_rank, receive_rank, first - held.start, first - wanted.start, end - first))
    return pieces
