"""Tensor-parallel sides of different degrees: every byte of every receiving rank, exactly once, from who has it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transfer.harness import FINGERPRINT
from tollbridge.errors import HandshakeError
from tollbridge.transfer.handshake import require_same
from tollbridge.transfer.heads import HeadSlice, heads_of, plan_heads, token_runs


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, int, int]:
    """Draw heads and two degrees that go with them."""
    num_heads = draw(st.integers(1, 24))
    degrees = [size for size in range(1, 65) if num_heads % size == 0 or size % num_heads == 0]
    return num_heads, draw(st.sampled_from(degrees)), draw(st.sampled_from(degrees))


@given(splits(), st.integers(1, 3), st.integers(1, 5))
def test_every_byte_arrives_exactly_once(split: tuple[int, int, int], num_tokens: int, head_bytes: int) -> None:
    num_heads, send_tp, receive_tp = split
    # [tokens, K or V, heads, bytes of a head]; 16 bits so that all bytes differ
    whole = np.arange(num_tokens * 2 * num_heads * head_bytes, dtype=np.uint16)
    whole = whole.reshape(num_tokens, 2, num_heads, head_bytes)
    held, wanted = (
        [whole[:, :, slice(heads.start, heads.stop)] for heads in _shards(num_heads, tp)] for tp in split[1:]
    )
    sent = [shard.reshape(num_tokens, -1) for shard in held]
    got = [np.zeros((num_tokens, shard[0].size), dtype=np.uint16) for shard in wanted]
    writes = [np.zeros(shard[0].size, dtype=int) for shard in wanted]
    for piece in plan_heads(num_heads, send_tp_size=send_tp, receive_tp_size=receive_tp):
        sizes = {"send_heads": held[piece.send_rank].shape[2], "receive_heads": wanted[piece.receive_rank].shape[2]}
        for run in token_runs(piece, head_bytes=head_bytes, **sizes):
            target = slice(run.receive_offset, run.receive_offset + run.num_bytes)
            source = slice(run.send_offset, run.send_offset + run.num_bytes)
            got[piece.receive_rank][:, target] = sent[piece.send_rank][:, source]
            writes[piece.receive_rank][target] += 1
    assert all((count == 1).all() for count in writes)
    assert all(np.array_equal(mine, shard.reshape(num_tokens, -1)) for mine, shard in zip(got, wanted, strict=True))


def _shards(num_heads: int, tp_size: int) -> list[range]:
    return [heads_of(rank, num_heads, tp_size) for rank in range(tp_size)]


@given(splits())
def test_no_more_slices_than_needed_and_copies_share_the_work(split: tuple[int, int, int]) -> None:
    num_heads, send_tp, receive_tp = split
    plan = plan_heads(num_heads, send_tp_size=send_tp, receive_tp_size=receive_tp)
    pairs = [(piece.send_rank, piece.receive_rank) for piece in plan]
    assert len(set(pairs)) == len(pairs)  # one run per pair of ranks
    assert [piece.receive_rank for piece in plan] == sorted(piece.receive_rank for piece in plan)
    counts = np.bincount([piece.send_rank for piece in plan], minlength=send_tp)
    if receive_tp % send_tp == 0 or (send_tp % receive_tp == 0 and send_tp <= num_heads):
        assert counts.max() == max(1, receive_tp // send_tp)


def test_examples() -> None:
    assert plan_heads(8, send_tp_size=1, receive_tp_size=1) == (HeadSlice(0, 0, 0, 0, 8),)
    assert plan_heads(8, send_tp_size=2, receive_tp_size=4)[2] == HeadSlice(1, 2, 0, 0, 2)
    assert plan_heads(8, send_tp_size=4, receive_tp_size=2)[1] == HeadSlice(1, 0, 0, 2, 2)
    assert plan_heads(2, send_tp_size=4, receive_tp_size=2) == (HeadSlice(0, 0, 0, 0, 1), HeadSlice(3, 1, 0, 0, 1))
    assert plan_heads(1, send_tp_size=1, receive_tp_size=2) == (HeadSlice(0, 0, 0, 0, 1), HeadSlice(0, 1, 0, 0, 1))


@pytest.mark.parametrize(("send_tp", "receive_tp", "side"), [(3, 1, "prefill"), (2, 6, "decode"), (0, 1, "prefill")])
def test_heads_that_do_not_divide(send_tp: int, receive_tp: int, side: str) -> None:
    with pytest.raises(HandshakeError, match=rf"tp_size is \d on the {side} side and num_kv_heads is 8"):
        plan_heads(8, send_tp_size=send_tp, receive_tp_size=receive_tp)


def test_the_handshake_refuses_what_frames_cannot_carry() -> None:
    other = msgspec.structs.replace(FINGERPRINT, tp_size=2)
    with pytest.raises(HandshakeError, match="tp_size is 1 here and 2 there"):
        require_same(FINGERPRINT, other)
