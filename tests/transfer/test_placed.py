"""What goes wrong between a payload in a ring and its header on the connection, on each medium with a ring."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.transfer.harness import DIGEST, PATIENT, SHORT, WAIT_S, Pair, PairMaker, make_pair, new_id
from tollbridge.errors import ProtocolError
from tollbridge.transfer import nixl, shm
from tollbridge.transfer.base import Reason
from tollbridge.transfer.connection import Connection
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.placed import Credits, Slots, choose

NUM_BLOCKS = 1024
TABLE = list(range(NUM_BLOCKS))
NUM_TOKENS = NUM_BLOCKS * 16  # 50 MB: more than any ring holds
OUTLETS: tuple[type[Any], ...] = (shm.ShmOutlet, nixl.NixlOutlet)


@pytest.fixture
def make_big(ring_medium: str) -> Iterator[PairMaker]:
    """Build pairs whose cache is larger than the ring; they are checked and closed afterwards."""
    pairs: list[Pair] = []

    def build(options: TransferOptions | None = None) -> Pair:
        pairs.append(make_pair(ring_medium, options, num_blocks=NUM_BLOCKS, token_bytes=1024))
        return pairs[-1]

    yield build
    for pair in pairs:
        pair.close()


@pytest.fixture
def credit(monkeypatch: pytest.MonkeyPatch) -> CreditGate:
    gate = CreditGate(Connection._give_credit)
    monkeypatch.setattr(Connection, "_give_credit", lambda connection, total: gate.give(connection, total))
    return gate


class CreditGate:
    """Keeps decode's credits back until it is opened; `dry` says that there was one."""

    def __init__(self, give: Any) -> None:
        self.dry = threading.Event()
        self._give = give
        self._kept: dict[Connection, int] = {}
        self._is_open = False

    def give(self, connection: Connection, total: int) -> None:
        if self._is_open and connection not in self._kept:
            self._give(connection, total)
            return
        self._kept[connection] = total
        self.dry.set()

    def open(self, pair: Pair) -> None:
        self._is_open = True
        for connection in list(self._kept):
            board = pair.receiver._side.lanes.boards[connection.home]  # type: ignore[attr-defined]
            board.call(partial(self._let_go, connection))
            board.flush_soon(connection.number)

    def _let_go(self, connection: Connection) -> None:
        self._give(connection, self._kept.pop(connection))


def start(pair: Pair, num_tokens: int = NUM_TOKENS, *, publish: int | None = None) -> str:
    transfer_id = new_id()
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=num_tokens)
    pair.receiver.open(pair.load(transfer_id, TABLE, num_tokens))
    pair.sender.publish(transfer_id, TABLE, num_tokens if publish is None else publish)
    return transfer_id


def finish(pair: Pair, transfer_id: str) -> None:
    sent, received = pair.ends(transfer_id)
    assert (sent.outcome, received.outcome) == ("done", "done"), (sent, received)
    assert np.array_equal(pair.send_cache.array, pair.receive_cache.array)


def test_more_than_a_ring(make_big: PairMaker, ring_medium: str) -> None:
    pair = make_big()
    transfer_id = start(pair)
    finish(pair, transfer_id)
    medium, streams = ring_medium.partition("-")[0], int(ring_medium.partition("-")[2] or 1)
    assert {end.medium for end in pair.ends(transfer_id)} == {medium}
    for side in (pair.sender, pair.receiver):
        statistics = side.statistics()
        assert statistics.payload_bytes_by_medium == {medium: NUM_TOKENS * 3 * 1024}
        assert 1 <= statistics.num_connections_by_medium[medium] <= streams
        assert statistics.medium == medium


def test_frames_fit_a_slot(make_big: PairMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring that is smaller than what the options call the smallest frame."""
    for module in (shm, nixl):
        monkeypatch.setattr(module, "SLOT_BYTES", 40_000)
    pair = make_big(replace(PATIENT, min_frame_bytes=1 << 20))
    transfer_id = start(pair)
    finish(pair, transfer_id)
    assert pair.ends(transfer_id)[0].num_frames > NUM_TOKENS * 3 * 1024 // 40_000


def test_a_slot_holds_at_least_a_granule(ring_medium: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (shm, nixl):
        monkeypatch.setattr(module, "SLOT_BYTES", 1000)
    pair = make_pair(ring_medium, num_blocks=NUM_BLOCKS, token_bytes=256, granule=16)
    finish(pair, start(pair))
    pair.close()


def test_a_payload_that_changes_under_way_fails_its_transfer_only(
    make_big: PairMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torn or late write: what is in the slot is not what the checksum was taken of."""
    pair, spoiled = make_big(), threading.Event()
    for outlet in OUTLETS:
        placed = outlet.maybe_placed

        def spoil(self: Any, placed: Any = placed) -> int | None:
            checksum: int | None = placed(self)
            if checksum is None or spoiled.is_set():
                return checksum
            spoiled.set()
            return checksum ^ 1

        monkeypatch.setattr(outlet, "maybe_placed", spoil)
    sent, received = pair.ends(start(pair))
    assert (sent.reason, received.reason) == (Reason.CHECKSUM, Reason.CHECKSUM)
    finish(pair, start(pair))


def test_credit_that_never_comes_ends_the_transfer(make_big: PairMaker, credit: CreditGate) -> None:
    pair = make_big(replace(SHORT, progress_timeout_s=3.0))  # and long enough for the next transfer
    transfer_id = start(pair)
    assert credit.dry.wait(WAIT_S)
    sent, received = pair.ends(transfer_id)
    assert (sent.outcome, received.outcome) == ("failed", "failed")
    assert sent.reason in (Reason.STALLED, Reason.PEER_LOST)
    credit.open(pair)
    finish(pair, start(pair))  # over a new connection with a new ring


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_cancel_while_the_ring_is_full(make_big: PairMaker, credit: CreditGate, side: str) -> None:
    pair = make_big()
    transfer_id = start(pair)
    assert credit.dry.wait(WAIT_S)
    if side == "prefill":
        pair.sender.cancel(transfer_id, "the client left")
        assert pair.sent.wait(transfer_id).reason == Reason.CANCELLED
        kept = pair.send_cache.array.copy()
        pair.send_cache.array[:] = 0  # the blocks are the engine's again
        assert pair.received.wait(transfer_id).reason == Reason.PEER_CANCELLED
        pair.send_cache.array[:] = kept
    else:
        pair.receiver.cancel(transfer_id, "the client left")
        assert pair.received.wait(transfer_id).reason == Reason.CANCELLED
        pair.receive_cache.array[:] = 0
        assert pair.sent.wait(transfer_id).reason == Reason.PEER_CANCELLED
    credit.open(pair)
    if side == "decode":
        tiny = new_id()  # behind whatever was still on its way
        pair.sender.register(tiny, digest=DIGEST, num_tokens=16)
        pair.sender.publish(tiny, [0], 16)
        pair.receiver.open(pair.load(tiny, [NUM_BLOCKS - 1], 16))
        assert [end.outcome for end in pair.ends(tiny)] == ["done", "done"]
        assert not pair.receive_cache.slots[:, :-16].any()  # nothing was written after the end
    finish(pair, start(pair))


def test_rewind_while_the_ring_is_full(make_big: PairMaker, credit: CreditGate) -> None:
    """What was placed stays valid though the engine reuses the blocks at once; the rest comes from other blocks."""
    pair = make_big()
    expected = pair.send_cache.slots.copy()
    transfer_id = start(pair)
    assert credit.dry.wait(WAIT_S)
    pair.sender.rewind(transfer_id)
    pair.send_cache.slots[:] = np.roll(expected, 16, axis=1)  # block i's KV now lives in block i + 1
    credit.open(pair)
    pair.sender.publish(transfer_id, [*TABLE[1:], 0], NUM_TOKENS)
    assert [end.outcome for end in pair.ends(transfer_id)] == ["done", "done"]
    assert np.array_equal(pair.receive_cache.slots, expected)


@pytest.mark.parametrize("closed", ["sender", "receiver"])
def test_close_while_the_ring_is_full(make_big: PairMaker, credit: CreditGate, closed: str) -> None:
    pair = make_big()
    transfer_id = start(pair)
    assert credit.dry.wait(WAIT_S)
    (pair.sender if closed == "sender" else pair.receiver).close()
    sent, received = pair.ends(transfer_id)
    assert {sent.reason, received.reason} == {Reason.SHUTDOWN, Reason.PEER_LOST}


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that nobody tells of."""
    deadline_s = time.monotonic() + 2 * WAIT_S  # another process starts first
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


PEER = """
import sys
from tests.transfer.harness import Cache, DIGEST, FINGERPRINT
from tollbridge.transfer.base import LoadRequest
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.tcp import TcpReceiver, TcpSender
role, medium = sys.argv[1:]
memory, options = Cache(1024, 16, seed=9, token_bytes=1024).memory, TransferOptions(heartbeat_s=0.05, media=medium)
table = list(range(1024))
if role == "prefill":
    sender = TcpSender(memory, FINGERPRINT, options)
    print(sender.address[1], flush=True)
    for transfer_id in sys.stdin:
        sender.register(transfer_id.strip(), digest=DIGEST, num_tokens=16 * 1024)
        sender.publish(transfer_id.strip(), table, 8 * 1024)
else:
    receiver = TcpReceiver(memory, FINGERPRINT, options)
    for line in sys.stdin:
        transfer_id, port = line.split()
        receiver.open(LoadRequest(transfer_id=transfer_id, host="127.0.0.1", port=int(port), digest=DIGEST,
                                  first_token=0, num_tokens=16 * 1024, block_table=table))
"""


def peer(role: str, medium: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", PEER, role, medium.partition("-")[0]], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def test_prefill_is_killed_while_it_sends(make_big: PairMaker, ring_medium: str) -> None:
    pair, transfer_id = make_big(PATIENT), new_id()
    with peer("prefill", ring_medium) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            port, before = int(process.stdout.readline()), pair.receive_cache.array[:1024].copy()
            process.stdin.write(f"{transfer_id}\n".encode())
            process.stdin.flush()
            pair.receiver.open(replace(pair.load(transfer_id, TABLE, NUM_TOKENS), port=port))
            until(lambda: not np.array_equal(pair.receive_cache.array[:1024], before))
        finally:
            process.kill()
    received = pair.received.wait(transfer_id)
    assert (received.outcome, received.reason) == ("failed", Reason.PEER_LOST)
    finish(pair, start(pair))


def test_decode_is_killed_while_it_receives(make_big: PairMaker, ring_medium: str) -> None:
    pair, transfer_id = make_big(PATIENT), new_id()
    book = pair.sender._side._book  # type: ignore[attr-defined]
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=NUM_TOKENS)
    with peer("decode", ring_medium) as process:
        assert process.stdin is not None
        try:
            process.stdin.write(f"{transfer_id} {pair.sender.address[1]}\n".encode())
            process.stdin.flush()
            pair.sender.publish(transfer_id, TABLE, NUM_TOKENS // 2)
            until(lambda: any(session.tally.num_frames for session in book._sessions.values()))
        finally:
            process.kill()
    sent = pair.sent.wait(transfer_id)
    assert (sent.outcome, sent.reason) == ("failed", Reason.PEER_LOST)
    pair.send_cache.array[:1000] = 0  # the blocks are the engine's again
    finish(pair, start(pair))


def test_prefill_cancels_towards_a_decode_that_stands_still(make_big: PairMaker, ring_medium: str) -> None:
    """A NIC may be in the middle of a write that will not end: the blocks come back all the same."""
    pair, transfer_id = make_big(), new_id()
    book = pair.sender._side._book  # type: ignore[attr-defined]
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=NUM_TOKENS)
    with peer("decode", ring_medium) as process:
        assert process.stdin is not None
        try:
            process.stdin.write(f"{transfer_id} {pair.sender.address[1]}\n".encode())
            process.stdin.flush()
            pair.sender.publish(transfer_id, TABLE, 100)
            until(lambda: any(session.tally.num_frames for session in book._sessions.values()))
            process.send_signal(signal.SIGSTOP)
            pair.sender.publish(transfer_id, TABLE, NUM_TOKENS)
            until(lambda: any(lane.waits_for_ring for lane in pair.sender._side.lanes.connections()))  # type: ignore[attr-defined]
            pair.sender.cancel(transfer_id, "the client left")
            assert pair.sent.wait(transfer_id).reason in (Reason.CANCELLED, Reason.PEER_LOST)
            pair.send_cache.array[:1000] = 0  # the blocks are the engine's again
        finally:
            process.kill()
    finish(pair, start(pair))


def test_credits_and_slots() -> None:
    credits = Credits(2)
    assert [credits.take(), credits.take()] == [0, 1]
    assert not credits.has_room()
    credits.freed(1)
    assert credits.take() == 0
    for wrong in (0, 4):
        with pytest.raises(ProtocolError, match="gave back"):
            credits.freed(wrong)
    slots = Slots(memoryview(bytearray(b"aabb")), num_slots=2, slot_bytes=2)
    assert [bytes(slots.payload(2)), slots.advance(), bytes(slots.payload(1))] == [b"aa", 1, b"b"]
    with pytest.raises(ProtocolError, match="a slot of the ring has 2"):
        slots.payload(3)


def test_choose() -> None:
    assert choose(("nixl", "shm", "tcp"), ("shm", "tcp")) == "shm"
    assert choose(("shm",), ("tcp",)) is None
