"""When the last byte of a split's KV arrives: layer-wise transfer behind a prefill, exactly and in closed form.

The recursion is f_k = max(f_{k-1}, a_k) + b_k / B for pieces (layers of chunks) computed at a_k with b_k bytes each.
For K equal pieces computed evenly over T it is greatest at an end: either the link is never idle after the first
piece, or the last piece finds it idle. With x = sum of b_k that gives max(T/K + x/B, T + x/(K B)), and the visible
part, less T, is max(x/(K B), x/B - T (1 - 1/K)).
"""

from __future__ import annotations

from collections.abc import Iterable

PIECES_PER_CHUNK = 24  # layers, where nobody said how many: only 1/K depends on it


def last_arrival_s(pieces: Iterable[tuple[float, float]], goodput_bytes_per_s: float, *, start_s: float = 0.0) -> float:
    """Return f_K by the recursion; each piece is (computed at, bytes), in order; the link is free from `start_s` on."""
    finish_s = start_s
    for computed_s, num_bytes in pieces:
        finish_s = max(finish_s, computed_s) + num_bytes / goodput_bytes_per_s
    return finish_s


def last_arrival_closed_s(
    num_bytes: float,
    goodput_bytes_per_s: float,
    *,
    compute_s: float,
    num_pieces: float,
    ready_bytes: float = 0.0,
    idle_s: float = 0.0,
) -> float:
    """Return f_K for equal pieces of together `num_bytes`, computed evenly over the last part of `compute_s`.

    `ready_bytes` are there at time 0 (in the prefill worker's prefix cache); `idle_s` of `compute_s` passes before the
    first piece begins, because decode has what is computed in it.
    """
    wire_s = num_bytes / goodput_bytes_per_s
    ready_s = ready_bytes / goodput_bytes_per_s
    if num_bytes <= 0.0:
        return ready_s
    piece_s = (compute_s - idle_s) / num_pieces
    return max(ready_s + wire_s, idle_s + piece_s + wire_s, compute_s + wire_s / num_pieces)


def visible_s(num_bytes: float, goodput_bytes_per_s: float, *, compute_s: float, num_pieces: float) -> float:
    """Return the time that the transfer adds to the prefill, for equal pieces and the same prefix on both sides."""
    closed = last_arrival_closed_s(num_bytes, goodput_bytes_per_s, compute_s=compute_s, num_pieces=num_pieces)
    return closed - compute_s if num_bytes > 0 else 0.0
