"""Memory whose blocks are not ordered by token: only whole blocks are runs of bytes, and only those may travel."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tests.transfer.harness import DIGEST, FINGERPRINT, NUM_LAYERS, TOKEN_BYTES, PairMaker, new_id
from tollbridge.clock import ManualClock
from tollbridge.errors import ProtocolError
from tollbridge.transfer.base import LoadRequest, Reason
from tollbridge.transfer.frames import Header, Kind
from tollbridge.transfer.memory import BufferMemory
from tollbridge.transfer.session import Opening, ReceiveSession, SendSession, payload_bytes

GRANULE = 16
SEND_TABLE = [5, 6, 7, 1, 0, 9]
RECEIVE_TABLE = [50, 3, 2, 4, 5, 6]
HEADER = Header(Kind.DATA, 0, bytes(16), 0, 0, 0, 1, 0, 0, 0, 0)


def blocks(cache_slots: np.ndarray, table: list[int], first_token: int, num_tokens: int) -> np.ndarray:
    """Return [num_layers, blocks that hold the tokens, bytes]."""
    by_block = cache_slots.reshape(NUM_LAYERS, -1, GRANULE * TOKEN_BYTES)
    return by_block[:, table[first_token // GRANULE : -(-(first_token + num_tokens) // GRANULE)]]


@pytest.mark.parametrize(("first_token", "num_tokens"), [(0, 96), (0, 1), (16, 17), (32, 50), (0, 95)])
def test_whole_blocks_travel(make: PairMaker, first_token: int, num_tokens: int) -> None:
    pair, transfer_id = make(granule=GRANULE), new_id()
    before = pair.receive_cache.slots.copy()
    end_token = first_token + num_tokens
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=end_token)
    pair.receiver.open(pair.load(transfer_id, RECEIVE_TABLE, num_tokens, first_token=first_token))
    for layer in range(NUM_LAYERS):
        pair.sender.publish(transfer_id, SEND_TABLE, end_token // 2, layer=layer)
    pair.sender.publish(transfer_id, SEND_TABLE, end_token)
    sent, received = pair.ends(transfer_id)
    assert (sent.outcome, received.outcome) == ("done", "done")
    expected = blocks(pair.send_cache.slots, SEND_TABLE, first_token, num_tokens)
    assert np.array_equal(blocks(pair.receive_cache.slots, RECEIVE_TABLE, first_token, num_tokens), expected)
    assert received.payload_bytes == sent.payload_bytes == expected.size
    assert received.num_tokens == num_tokens
    untouched = [block for block in range(64) if block not in RECEIVE_TABLE]
    after, old = (array.reshape(NUM_LAYERS, 64, -1)[:, untouched] for array in (pair.receive_cache.slots, before))
    assert np.array_equal(after, old)


def test_a_load_begins_with_a_granule(make: PairMaker) -> None:
    pair = make(granule=GRANULE)
    with pytest.raises(ValueError, match="does not begin a granule of 16"):
        pair.receiver.open(pair.load(new_id(), RECEIVE_TABLE, 20, first_token=8))


def memory(num_blocks: int = 8, granule: int = GRANULE) -> BufferMemory:
    size = NUM_LAYERS * num_blocks * 16 * 4
    return BufferMemory(
        bytearray(size), num_layers=NUM_LAYERS, num_blocks=num_blocks, block_size=16, token_bytes=4, granule=granule
    )


def opened(first_token: int, num_tokens: int, prompt_tokens: int) -> SendSession:
    session = SendSession(bytes(16), memory(), ManualClock())
    session.register(DIGEST, prompt_tokens)
    session.open(Opening(connection=1, epoch=1, digest=DIGEST, first_token=first_token, num_tokens=num_tokens))
    return session


def test_a_partial_granule_waits_for_the_end_of_the_range() -> None:
    session = opened(16, 50, 100)
    session.publish(range(8), 40, 0)
    assert session.take(10**6) == (0, 1, 16, 16)
    assert not session.has_data()
    session.publish(range(8), 63, 0)
    assert session.take(10**6) == (0, 1, 32, 16)
    session.publish(range(8), 65, 0)
    assert session.take(10**6) == (0, 1, 48, 16)
    assert not session.has_data()
    session.publish(range(8), 66, 0)  # decode's range ends here, the prompt does not
    assert session.take(10**6) == (0, 1, 64, 2)
    session.check()


def test_a_frame_has_whole_granules() -> None:
    session = opened(0, 70, 70)
    session.publish(range(8), 70, None)
    assert session.take(1) == (0, 1, 0, 16)  # one at least
    assert session.take(2 * 16 * 4 + 5) == (0, 1, 16, 32)
    assert session.take(10**6) == (0, 1, 48, 22)
    assert session.tally.payload_bytes == 5 * 64


def test_a_peer_that_asks_within_a_granule() -> None:
    verdict = opened(8, 20, 100).mismatch()
    assert verdict is not None and verdict.reason == Reason.PROTOCOL
    assert "within a granule" in verdict.detail


def test_decode_bounds_the_frames() -> None:
    session = SendSession(bytes(16), memory(granule=1), ManualClock())
    session.register(DIGEST, 100)
    session.open(Opening(connection=1, epoch=1, digest=DIGEST, first_token=0, num_tokens=100, max_payload_bytes=40))
    session.publish(range(8), 100, None)
    assert session.take(10**6) == (0, 1, 0, 10)


@pytest.mark.parametrize(
    ("first_token", "num_tokens", "size"),
    [(8, 16, 64), (16, 8, 64), (16, 16, 63), (64, 6, 24), (64, 6, 63)],
)
def test_frames_that_do_not_fit_are_refused(first_token: int, num_tokens: int, size: int) -> None:
    session = receiving(70)
    with pytest.raises(ProtocolError):
        session.begin(HEADER._replace(first_token=first_token, num_tokens=num_tokens, payload_bytes=size))


def receiving(num_tokens: int) -> ReceiveSession:
    load = LoadRequest(
        transfer_id="0" * 32, host="", port=0, digest=DIGEST, first_token=0, num_tokens=num_tokens, block_table=range(8)
    )
    return ReceiveSession(load, 1, 1, memory(), ManualClock())


def test_frames_that_fit() -> None:
    session = receiving(70)
    tail = HEADER._replace(first_token=64, num_tokens=6, payload_bytes=64)
    assert session.begin(tail) == (0, range(8), 64, 6, 1)
    assert session.begin(tail) is None  # it is on its way on another lane
    with pytest.raises(ProtocolError, match="second time"):
        session.begin(HEADER._replace(first_token=48, num_tokens=22, payload_bytes=128))
    session.check()


def test_payload_bytes() -> None:
    assert [payload_bytes(memory(), count) for count in (0, 1, 16, 17)] == [0, 64, 64, 128]
    assert payload_bytes(memory(granule=1), 17) == 68


def test_granule_must_divide_the_block() -> None:
    with pytest.raises(ValueError, match="granule must divide"):
        BufferMemory(bytearray(16), num_layers=1, num_blocks=1, block_size=16, token_bytes=1, granule=3)


def test_a_peer_with_another_granule(make: PairMaker) -> None:
    """The fingerprint keeps such workers apart; were it wrong, the transfer fails and nothing is accepted."""
    pair = make(receive_granule=GRANULE)
    transfer_id = new_id()
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=20)
    pair.sender.publish(transfer_id, SEND_TABLE, 20)
    pair.receiver.open(pair.load(transfer_id, RECEIVE_TABLE, 20))
    assert [end.reason for end in pair.ends(transfer_id)] == [Reason.PROTOCOL] * 2
    assert msgspec.structs.replace(FINGERPRINT) == FINGERPRINT
