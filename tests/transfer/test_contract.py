"""What every medium promises (transfer/base.py), on each medium."""

from __future__ import annotations

import random
import socket
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from tests.transfer.harness import (
    DIGEST,
    FINGERPRINT,
    NUM_LAYERS,
    OTHER_DIGEST,
    PATIENT,
    SHORT,
    TOKEN_BYTES,
    Pair,
    PairMaker,
    new_id,
)
from tollbridge.errors import TransferError
from tollbridge.transfer.base import Reason
from tollbridge.transfer.frames import HEADER_BYTES

SEND_TABLE = [5, 6, 7, 1, 0, 9, 8, 20, 40, 41]
RECEIVE_TABLE = [50, 3, 2, 4, 5, 6, 60, 61, 30, 11]


def run_through(pair: Pair, num_tokens: int, *, first_token: int = 0, opens_first: bool = False) -> str:
    """Transfer a prompt of `num_tokens` from `first_token` on, and compare all memory."""
    transfer_id = new_id()
    before = pair.receive_cache.slots.copy()
    load = pair.load(transfer_id, RECEIVE_TABLE, num_tokens - first_token, first_token=first_token)
    if opens_first:
        pair.receiver.open(load)
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=num_tokens)
    pair.sender.publish(transfer_id, SEND_TABLE, num_tokens)
    if not opens_first:
        pair.receiver.open(load)
    sent, received = pair.ends(transfer_id)
    assert (sent.outcome, received.outcome) == ("done", "done"), (sent, received)
    require_equal(pair, before, first_token, num_tokens - first_token)
    for end in (sent, received):
        assert end.num_tokens == num_tokens - first_token
        assert end.payload_bytes == TOKEN_BYTES * NUM_LAYERS * (num_tokens - first_token)
        control_bytes = end.wire_bytes - end.payload_bytes - end.num_frames * HEADER_BYTES
        assert 2 * HEADER_BYTES < control_bytes < 20 * HEADER_BYTES
    return transfer_id


def require_equal(pair: Pair, before: np.ndarray, first_token: int, num_tokens: int) -> None:
    """Decode's memory holds prefill's bytes in the range, and what it held before everywhere else."""
    expected = before.copy()
    slots = pair.receive_cache.slot_numbers(RECEIVE_TABLE, first_token, num_tokens)
    expected[:, slots] = pair.send_cache.tokens(SEND_TABLE, first_token, num_tokens)
    assert np.array_equal(pair.receive_cache.slots, expected)


@pytest.mark.parametrize("opens_first", [False, True])
@pytest.mark.parametrize(("first_token", "num_tokens"), [(0, 160), (0, 1), (0, 37), (16, 32), (48, 159), (7, 100)])
def test_ranges_in_both_orders(make: PairMaker, first_token: int, num_tokens: int, opens_first: bool) -> None:
    run_through(make(), num_tokens, first_token=first_token, opens_first=opens_first)


@pytest.mark.parametrize(("send_size", "receive_size"), [(16, 32), (32, 16), (16, 24)])
def test_block_sizes_may_differ(make: PairMaker, send_size: int, receive_size: int) -> None:
    run_through(make(send_block_size=send_size, receive_block_size=receive_size), 150, first_token=5)


@pytest.mark.parametrize("opens_first", [False, True])
def test_empty_range(make: PairMaker, opens_first: bool) -> None:
    run_through(make(), 20, first_token=20, opens_first=opens_first)


def test_empty_range_needs_no_table(make: PairMaker) -> None:
    pair, transfer_id = make(), new_id()
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=20)
    pair.receiver.open(pair.load(transfer_id, [], 0))
    assert [end.outcome for end in pair.ends(transfer_id)] == ["done", "done"]


def test_layers_and_chunks(make: PairMaker) -> None:
    pair, transfer_id = make(), new_id()
    before = pair.receive_cache.slots.copy()
    pair.receiver.open(pair.load(transfer_id, RECEIVE_TABLE, 95, first_token=5))
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=100)
    for end_token in (30, 64, 100):
        for layer in range(NUM_LAYERS):
            pair.sender.publish(transfer_id, SEND_TABLE[: -(-end_token // 16)], end_token, layer=layer)
        pair.check()
    pair.sender.publish(transfer_id, SEND_TABLE, 100)
    sent, received = pair.ends(transfer_id)
    assert (sent.outcome, received.outcome) == ("done", "done")
    require_equal(pair, before, 5, 95)


def test_pending_bytes_go_down_to_nothing(make: PairMaker) -> None:
    pair, transfer_id = make(), new_id()
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=160)
    assert pair.sender.statistics().pending_bytes == 0, "nobody has asked yet"
    pair.receiver.open(pair.load(transfer_id, RECEIVE_TABLE, 160))
    whole = 160 * NUM_LAYERS * TOKEN_BYTES
    pair.wait_until(lambda: pair.receiver.statistics().pending_bytes == whole)
    pair.sender.publish(transfer_id, SEND_TABLE[:5], 80)
    pair.wait_until(lambda: {side.statistics().pending_bytes for side in (pair.sender, pair.receiver)} == {whole // 2})
    pair.sender.publish(transfer_id, SEND_TABLE, 160)
    sent, _ = pair.ends(transfer_id)
    assert sent.payload_bytes == whole


def test_many_transfers_at_once(make: PairMaker) -> None:
    pair = make(num_blocks=400)
    rng = random.Random(7)
    blocks = rng.sample(range(400), 400)
    jobs = [(new_id(), blocks[10 * i : 10 * i + 10], rng.randrange(0, 50), rng.randrange(60, 160)) for i in range(40)]
    for transfer_id, table, first, end in jobs:
        load = pair.load(transfer_id, table, end - first, first_token=first)
        steps = [
            lambda i=transfer_id, e=end: pair.sender.register(i, digest=DIGEST, num_tokens=e),
            lambda load=load: pair.receiver.open(load),
        ]
        rng.shuffle(steps)
        for step in steps:
            step()
    for transfer_id, table, _, end in rng.sample(jobs, len(jobs)):
        pair.sender.publish(transfer_id, table, end)
    for transfer_id, table, first, end in jobs:
        assert [side.outcome for side in pair.ends(transfer_id)] == ["done", "done"]
        sent = pair.send_cache.tokens(table, first, end - first)
        assert np.array_equal(sent, pair.receive_cache.tokens(table, first, end - first))
    assert pair.receiver.statistics().done == 40
    assert pair.receiver.statistics().goodput_bytes_per_s > 0


def test_rewind_keeps_what_was_sent(make: PairMaker) -> None:
    pair, transfer_id = make(), new_id()
    before = pair.receive_cache.slots.copy()
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=100)
    pair.receiver.open(pair.load(transfer_id, RECEIVE_TABLE, 100))
    pair.sender.publish(transfer_id, SEND_TABLE[:2], 32)
    pair.sender.rewind(transfer_id)
    pair.check()
    pair.sender.publish(transfer_id, SEND_TABLE, 100)
    sent, received = pair.ends(transfer_id)
    assert (sent.outcome, received.outcome) == ("done", "done")
    assert received.payload_bytes == 100 * NUM_LAYERS * TOKEN_BYTES
    require_equal(pair, before, 0, 100)


@pytest.mark.parametrize("opens_first", [False, True])
def test_other_digest_fails_both_sides(make: PairMaker, opens_first: bool) -> None:
    pair, transfer_id = make(), new_id()
    before = pair.receive_cache.slots.copy()
    load = pair.load(transfer_id, RECEIVE_TABLE, 32, digest=OTHER_DIGEST)
    if opens_first:
        pair.receiver.open(load)
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=32)
    pair.sender.publish(transfer_id, SEND_TABLE, 32)
    if not opens_first:
        pair.receiver.open(load)
    sent, received = pair.ends(transfer_id)
    assert (sent.outcome, received.outcome) == ("failed", "failed")
    assert (sent.reason, received.reason) == (Reason.DIGEST, Reason.DIGEST)
    assert np.array_equal(pair.receive_cache.slots, before)
    assert pair.sender.statistics().failures_by_reason == {Reason.DIGEST: 1}


def test_range_beyond_the_prompt_fails(make: PairMaker) -> None:
    pair, transfer_id = make(), new_id()
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=32)
    pair.receiver.open(pair.load(transfer_id, RECEIVE_TABLE, 33))
    assert [end.reason for end in pair.ends(transfer_id)] == [Reason.PROTOCOL, Reason.PROTOCOL]


@pytest.mark.parametrize("state", ["unknown", "queued", "computing"])
def test_decode_cancels(make: PairMaker, state: str) -> None:
    pair, transfer_id = make(), new_id()
    pair.receiver.open(pair.load(transfer_id, RECEIVE_TABLE, 64))
    if state != "unknown":
        pair.sender.register(transfer_id, digest=DIGEST, num_tokens=64)
    if state == "computing":
        pair.sender.publish(transfer_id, SEND_TABLE, 10)
    pair.receiver.cancel(transfer_id, "the client left")
    received = pair.received.wait(transfer_id)
    assert (received.outcome, received.reason, received.detail) == ("cancelled", Reason.CANCELLED, "the client left")
    if state == "unknown":
        pair.sender.register(transfer_id, digest=DIGEST, num_tokens=64)
    sent = pair.sent.wait(transfer_id)
    assert (sent.outcome, sent.reason) == ("cancelled", Reason.PEER_CANCELLED)
    pair.sender.publish(transfer_id, SEND_TABLE, 64)  # after the end: ignored
    pair.check()


@pytest.mark.parametrize("state", ["queued", "computing", "not opened"])
def test_prefill_cancels(make: PairMaker, state: str) -> None:
    pair, transfer_id = make(), new_id()
    load = pair.load(transfer_id, RECEIVE_TABLE, 64)
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=64)
    if state != "not opened":
        pair.receiver.open(load)
    if state == "computing":
        pair.sender.publish(transfer_id, SEND_TABLE, 10)
    pair.sender.cancel(transfer_id, "the client left")
    sent = pair.sent.wait(transfer_id)
    assert (sent.outcome, sent.reason, sent.detail) == ("cancelled", Reason.CANCELLED, "the client left")
    if state == "not opened":
        pair.receiver.open(load)
    received = pair.received.wait(transfer_id)
    assert (received.outcome, received.reason) == ("failed", Reason.PEER_CANCELLED)


def test_cancel_after_the_end_and_of_unknown_ids(make: PairMaker) -> None:
    pair = make()
    transfer_id = run_through(pair, 40)
    for side in (pair.sender, pair.receiver):
        side.cancel(transfer_id, "too late")
        side.cancel(new_id(), "never heard of")
        side.check()
        assert side.poll() == []
    pair.sender.rewind(transfer_id)
    pair.sender.publish(new_id(), SEND_TABLE, 3)


def test_an_id_is_used_once(make: PairMaker) -> None:
    pair, transfer_id = make(), new_id()
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=64)
    with pytest.raises(TransferError, match="already active"):
        pair.sender.register(transfer_id, digest=DIGEST, num_tokens=64)
    pair.receiver.open(pair.load(transfer_id, RECEIVE_TABLE, 64))
    with pytest.raises(TransferError, match="already active"):
        pair.receiver.open(pair.load(transfer_id, RECEIVE_TABLE, 64))


def test_arguments_are_checked_where_they_are_given(make: PairMaker) -> None:
    pair, transfer_id = make(), new_id()
    with pytest.raises(TransferError, match="32 hex digits"):
        pair.sender.register("nonsense", digest=DIGEST, num_tokens=1)
    with pytest.raises(ValueError, match="does not cover 33 tokens"):
        pair.receiver.open(pair.load(transfer_id, [1, 2], 33))
    with pytest.raises(ValueError, match=r"outside 0\.\.63"):
        pair.sender.publish(transfer_id, [64], 1)
    with pytest.raises(ValueError, match="Layer 3"):
        pair.sender.publish(transfer_id, [1], 1, layer=NUM_LAYERS)


def test_fingerprints_must_agree(make: PairMaker) -> None:
    pair = make(receive_fingerprint=msgspec.structs.replace(FINGERPRINT, head_size=13))
    transfer_id = new_id()
    pair.receiver.open(pair.load(transfer_id, RECEIVE_TABLE, 64))
    received = pair.received.wait(transfer_id)
    assert (received.outcome, received.reason) == ("failed", Reason.HANDSHAKE)
    assert "head_size is 13 here and 12 there" in received.detail


def test_nobody_listens(make: PairMaker) -> None:
    pair, transfer_id = make(), new_id()
    host = pair.sender.address[0]
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        pair.receiver.open(replace(pair.load(transfer_id, [0], 1), host=host, port=port))
        assert pair.received.wait(transfer_id).reason == Reason.PEER_LOST


def test_decode_gives_up_on_a_request_that_prefill_never_got(make: PairMaker) -> None:
    pair, transfer_id = make(replace(PATIENT, unknown_timeout_s=SHORT.unknown_timeout_s)), new_id()
    pair.receiver.open(pair.load(transfer_id, RECEIVE_TABLE, 64))
    received = pair.received.wait(transfer_id)
    assert (received.outcome, received.reason) == ("failed", Reason.UNKNOWN)


def test_prefill_gives_up_on_a_decode_that_never_asks(make: PairMaker) -> None:
    pair, transfer_id = make(replace(PATIENT, open_timeout_s=SHORT.open_timeout_s)), new_id()
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=64)
    pair.sender.publish(transfer_id, SEND_TABLE, 64)
    sent = pair.sent.wait(transfer_id)
    assert (sent.outcome, sent.reason) == ("failed", Reason.NOT_OPENED)


def test_heartbeats_keep_a_slow_prefill_alive(make: PairMaker) -> None:
    """Without them none would live so long; with them one may die where this machine stands still for as long."""
    pair = make(SHORT)
    for _ in range(5):
        transfer_id = new_id()
        pair.sender.register(transfer_id, digest=DIGEST, num_tokens=64)
        pair.receiver.open(pair.load(transfer_id, RECEIVE_TABLE, 64))
        clock = [waited_in_vain(pair) for _ in range(2)]  # twice as long as a silent transfer would live
        pair.sender.publish(transfer_id, SEND_TABLE, 64)
        outcomes = [end.outcome for end in pair.ends(transfer_id)]
        if clock == [Reason.UNKNOWN] * 2 and outcomes == ["done", "done"]:
            return
    raise AssertionError(f"{clock}, {outcomes}")


def waited_in_vain(pair: Pair) -> str:
    """Open what prefill never registers, and return why it ended: with `SHORT`, after 0.4 s."""
    transfer_id = new_id()
    pair.receiver.open(pair.load(transfer_id, RECEIVE_TABLE, 64))
    return pair.received.wait(transfer_id).reason


@pytest.mark.parametrize("closed", ["sender", "receiver"])
def test_close_ends_everything(make: PairMaker, closed: str) -> None:
    pair, waiting, running = make(), new_id(), new_id()
    pair.receiver.open(pair.load(waiting, RECEIVE_TABLE, 64))
    pair.receiver.open(pair.load(running, RECEIVE_TABLE, 64))
    pair.sender.register(running, digest=DIGEST, num_tokens=64)
    pair.sender.publish(running, SEND_TABLE, 10)
    pair.sender.register(new_id(), digest=DIGEST, num_tokens=64)
    if closed == "sender":
        pair.sender.close()
        assert pair.sent.wait(running).reason == Reason.SHUTDOWN
        assert pair.received.wait(running).reason == Reason.PEER_LOST
        with pytest.raises(TransferError, match="closed"):
            pair.sender.register(new_id(), digest=DIGEST, num_tokens=1)
    else:
        pair.receiver.close()
        assert pair.received.wait(running).reason == Reason.SHUTDOWN
        assert pair.received.wait(waiting).reason == Reason.SHUTDOWN
        with pytest.raises(TransferError, match="closed"):
            pair.receiver.open(pair.load(new_id(), RECEIVE_TABLE, 1))


def finish(pair: Pair, table: list[int], *, num_tokens: int = 32) -> str:
    """Register and publish a send that decode has not opened."""
    transfer_id = new_id()
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=num_tokens)
    pair.sender.publish(transfer_id, table, num_tokens)
    return transfer_id


def test_shedding_gives_up_the_newest_unopened_sends(make: PairMaker) -> None:
    pair = make()
    ids = [finish(pair, [2 * n, 2 * n + 1]) for n in range(4)]
    pair.sender.shed(ids, 5, unsent_too=False)
    for transfer_id in ids[2:]:
        end = pair.sent.wait(transfer_id)
        assert (end.outcome, end.reason) == ("failed", Reason.PINNED_BOUND)
    pair.receiver.open(pair.load(ids[3], [0, 1], 32))  # decode comes too late, and is told why
    assert pair.received.wait(ids[3]).reason == Reason.PINNED_BOUND
    for transfer_id in ids[:2]:
        pair.receiver.open(pair.load(transfer_id, [0, 1], 32))
        assert [end.outcome for end in pair.ends(transfer_id)] == ["done", "done"]


def test_shedding_counts_a_shared_block_once(make: PairMaker) -> None:
    pair = make()
    ids = [finish(pair, [7, n]) for n in range(3)]
    pair.sender.shed(ids, 4, unsent_too=True)
    pair.sender.shed([*ids, new_id()], 4, unsent_too=True)
    for transfer_id in ids:
        pair.receiver.open(pair.load(transfer_id, [0, 1], 32))
        assert [end.outcome for end in pair.ends(transfer_id)] == ["done", "done"]
