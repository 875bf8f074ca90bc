"""Sessions and books under random engines: a model drives both sides over the loopback with a manual clock."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from tests.transfer.harness import DIGEST, FINGERPRINT, OTHER_DIGEST, Cache, new_id
from tollbridge.clock import ManualClock
from tollbridge.errors import ProtocolError
from tollbridge.transfer.base import LoadRequest, Reason, TransferEnd
from tollbridge.transfer.frames import Header, Kind
from tollbridge.transfer.loopback import LoopbackNetwork
from tollbridge.transfer.messages import Open, encode_body
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.session import Opening, ReceiveSession, SendSession

MAX_TOKENS = 40
OPTIONS = TransferOptions(min_frame_bytes=500, max_frame_bytes=1000, max_pending_opens=3)


class Engines(RuleBasedStateMachine):
    """Two engines that register, publish, rewind, open and cancel in any order, while time passes."""

    known = Bundle("known")

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        network = LoopbackNetwork(OPTIONS, clock=self.clock)
        self.send_cache, self.receive_cache = Cache(64, 4, seed=1), Cache(64, 8, seed=2)
        fingerprint = FINGERPRINT
        self.sender = network.sender(self.send_cache.memory, fingerprint)
        self.receiver = network.receiver(self.receive_cache.memory, fingerprint)
        self.count = 0
        self.tables: dict[str, tuple[list[int], list[int]]] = {}
        self.registered: dict[str, int] = {}
        self.loads: dict[str, LoadRequest] = {}
        self.ended: dict[tuple[str, str], TransferEnd] = {}

    @rule(target=known)
    def invent(self) -> str:
        transfer_id = new_id()
        lane = self.count % 4
        self.count += 1
        self.tables[transfer_id] = (list(range(10 * lane, 10 * lane + 10)), list(range(5 * lane, 5 * lane + 5)))
        return transfer_id

    @rule(transfer_id=known, num_tokens=st.integers(1, MAX_TOKENS))
    def register(self, transfer_id: str, num_tokens: int) -> None:
        if transfer_id not in self.registered:
            self.registered[transfer_id] = num_tokens
            self.sender.register(transfer_id, digest=DIGEST, num_tokens=num_tokens)

    @rule(transfer_id=known, num_tokens=st.integers(0, MAX_TOKENS), layer=st.none() | st.integers(0, 2))
    def publish(self, transfer_id: str, num_tokens: int, layer: int | None) -> None:
        table = self.tables[transfer_id][0]
        num_tokens = min(num_tokens, self.registered.get(transfer_id, MAX_TOKENS))
        self.sender.publish(transfer_id, table[: -(-num_tokens // 4)], num_tokens, layer=layer)

    @rule(transfer_id=known)
    def finish_prefill(self, transfer_id: str) -> None:
        self.sender.publish(transfer_id, self.tables[transfer_id][0], self.registered.get(transfer_id, 0))

    @rule(transfer_id=known)
    def rewind(self, transfer_id: str) -> None:
        self.sender.rewind(transfer_id)

    @rule(
        transfer_id=known,
        first=st.integers(0, MAX_TOKENS),
        num_tokens=st.integers(0, MAX_TOKENS),
        digest=st.sampled_from([DIGEST, DIGEST, DIGEST, OTHER_DIGEST]),
    )
    def open(self, transfer_id: str, first: int, num_tokens: int, digest: bytes) -> None:
        if transfer_id in self.loads:
            return
        host, port = self.sender.address
        load = self.loads[transfer_id] = LoadRequest(
            transfer_id=transfer_id,
            host=host,
            port=port,
            digest=digest,
            first_token=first,
            num_tokens=min(num_tokens, MAX_TOKENS - first),
            block_table=self.tables[transfer_id][1],
        )
        self.receiver.open(load)

    @rule(transfer_id=known)
    def decode_cancels(self, transfer_id: str) -> None:
        self.receiver.cancel(transfer_id, "left")

    @rule(transfer_id=known)
    def prefill_cancels(self, transfer_id: str) -> None:
        self.sender.cancel(transfer_id, "left")

    @rule(seconds=st.sampled_from([0.3, 1.0, 4.0, 11.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def poll(self) -> None:
        for end in [*self.sender.poll(), *self.receiver.poll()]:
            assert (end.transfer_id, end.side) not in self.ended
            self.ended[end.transfer_id, end.side] = end
            if end.side == "receive" and end.outcome == "done":
                self.require_equal(self.loads[end.transfer_id], end)

    def require_equal(self, load: LoadRequest, end: TransferEnd) -> None:
        sent, received = self.tables[load.transfer_id]
        lanes = [ids for ids in self.tables if self.tables[ids] == (sent, received)]
        if len(lanes) == 1:  # otherwise another transfer may have used the blocks since
            expected = self.send_cache.tokens(sent, load.first_token, load.num_tokens)
            assert np.array_equal(self.receive_cache.tokens(received, load.first_token, load.num_tokens), expected)
        assert end.num_tokens == load.num_tokens

    @invariant()
    def invariants_hold(self) -> None:
        self.sender.check()
        self.receiver.check()

    def teardown(self) -> None:
        """Given enough time everything ends, once."""
        for transfer_id in self.registered:
            self.finish_prefill(transfer_id)
        for _ in range(3):
            self.clock.advance(31.0)
            self.poll()
        assert {key for key in self.ended if key[1] == "send"} == {(i, "send") for i in self.registered}
        assert {key for key in self.ended if key[1] == "receive"} == {(i, "receive") for i in self.loads}
        self.sender.close()
        self.receiver.close()
        self.sender.check()
        self.receiver.check()


TestEngines = Engines.TestCase
TestEngines.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def make_session(
    clock: ManualClock, *, num_tokens: int = 20, first_token: int = 0, batch_bytes: int = 0
) -> SendSession:
    memory = Cache(4, 16, seed=0).memory
    memory.batch_bytes = batch_bytes
    session = SendSession(b"t" * 16, memory, clock)
    session.register(DIGEST, 20)
    session.open(Opening(connection=1, epoch=1, digest=DIGEST, first_token=first_token, num_tokens=num_tokens))
    return session


def test_lowest_layer_first_and_frames_within_their_size() -> None:
    session = make_session(ManualClock())
    session.publish([0, 1], 20, 2)
    session.publish([0, 1], 20, 0)
    chunks = []
    while (chunk := session.take(96 * 8 + 50)) is not None:
        chunks.append(tuple(chunk))
        session.check()
    assert chunks == [(0, 1, 0, 8), (0, 1, 8, 8), (0, 1, 16, 4), (2, 1, 0, 8), (2, 1, 8, 8), (2, 1, 16, 4)]
    session.publish([0, 1], 20, 1)
    assert session.take(10**6) == (1, 1, 0, 20)
    assert session.complete


def test_layers_that_are_ready_together_share_a_frame() -> None:
    session = make_session(ManualClock(), batch_bytes=1)
    session.publish([0, 1], 20, 0)
    session.publish([0, 1], 20, 1)
    assert session.take(10**6) == (0, 2, 0, 20)
    session.publish([0, 1], 20, 2)
    assert session.take(10**6) == (2, 1, 0, 20) and session.complete
    narrow = make_session(ManualClock(), batch_bytes=1)
    narrow.publish([0, 1], 20, None)
    assert [narrow.take(2 * 20 * 96), narrow.take(2 * 20 * 96)] == [(0, 2, 0, 20), (2, 1, 0, 20)]


def test_where_frames_are_dear_the_first_layers_wait_for_the_next_ones_but_not_for_the_next_pass() -> None:
    session = make_session(ManualClock(), batch_bytes=20 * 96 * 2)
    session.publish([0, 1], 20, 0)
    assert not session.has_data() and session.take(10**6) is None
    session.publish([0, 1], 20, 1)
    assert session.take(10**6) == (0, 2, 0, 20)  # worth a frame
    session.publish([0, 1], 20, 2)
    assert session.take(10**6) == (2, 1, 0, 20)  # all there is
    chunked = make_session(ManualClock(), batch_bytes=10**9)
    chunked.publish([0, 1], 16, 0)
    chunked.publish([0, 1], 16, 1)
    assert not chunked.has_data()
    chunked.publish([0, 1], 16, 2)
    assert chunked.take(10**6) == (0, 3, 0, 16)  # the pass is through, and the next one may be long


def test_a_frame_has_at_least_one_token() -> None:
    session = make_session(ManualClock())
    session.publish([0, 1], 20, None)
    chunk = session.take(1)
    assert chunk is not None and chunk.num_tokens == 1


def test_states() -> None:
    session = SendSession(b"t" * 16, Cache(4, 16, seed=0).memory, ManualClock())
    assert session.state == "unknown"
    session.register(DIGEST, 20)
    assert session.state == "queued"
    session.publish([0], 10, 1)
    assert (session.state, session.published_tokens) == ("computing", 0)
    session.publish([0, 1], 20, None)
    assert (session.state, session.published_tokens) == ("sending", 20)
    session.rewind()
    assert session.state == "queued"


def test_publishing_never_lowers_and_rewinding_never_resends() -> None:
    session = make_session(ManualClock())
    session.publish([0, 1], 20, None)
    session.publish([0], 5, None)
    assert session.published_tokens == 20
    session.take(96 * 7)
    session.rewind()
    assert not session.has_data()
    session.publish([2], 5, None)
    assert session.take(10**6) == (1, 1, 0, 5)
    session.publish([2, 3], 20, None)
    assert session.take(10**6) == (0, 1, 7, 13)


def test_deadlines_of_the_send_side() -> None:
    clock = ManualClock()
    session = make_session(clock)
    clock.advance(100)
    assert session.overdue(OPTIONS) is None  # prefill may take as long as it takes
    session.publish([0, 1], 20, None)
    while session.take(10**6):
        pass
    clock.advance(4.9)
    assert session.overdue(OPTIONS) is None
    clock.advance(0.2)
    verdict = session.overdue(OPTIONS)
    assert verdict is not None and verdict.reason == Reason.STALLED


def test_deadlines_of_the_receive_side() -> None:
    clock = ManualClock()
    load = LoadRequest(
        transfer_id="0f" * 16, host="p", port=1, digest=DIGEST, first_token=0, num_tokens=4, block_table=(0,)
    )
    session = ReceiveSession(load, 1, 1, Cache(4, 16, seed=0).memory, clock)
    clock.advance(9.9)
    assert session.overdue(OPTIONS) is None
    clock.advance(0.2)
    verdict = session.overdue(OPTIONS)
    assert verdict is not None and verdict.reason == Reason.PEER_LOST
    session.ask()
    for _ in range(10):
        assert session.overdue(OPTIONS) is None
        clock.advance(1.01)
        session.heard("unknown")
    verdict = session.overdue(OPTIONS)
    assert verdict is not None and verdict.reason == Reason.UNKNOWN
    session.heard("queued")
    assert session.overdue(OPTIONS) is None
    clock.advance(5.1)
    verdict = session.overdue(OPTIONS)
    assert verdict is not None and verdict.reason == Reason.STALLED


def test_long_transfers_do_not_starve() -> None:
    """Three times more arrives than the link carries: a long transfer is overtaken only by what came soon after it."""
    clock = ManualClock()
    cache = Cache(64, 16, seed=0)
    sender = LoopbackNetwork(OPTIONS, clock=clock).sender(cache.memory, FINGERPRINT)
    layer_bytes = 96 * 16  # of a short transfer; the link carries one a second

    def add(index: int, num_tokens: int) -> None:
        transfer_id = f"{index:032x}"
        sender.register(transfer_id, digest=DIGEST, num_tokens=num_tokens)
        body = encode_body(Open(digest=DIGEST, first_token=0, num_tokens=num_tokens))
        header = Header(Kind.OPEN, 0, bytes.fromhex(transfer_id), 0, 1, 0, 0, 0, 0, len(body), 0)
        sender.book.control(1, header, body)
        sender.publish(transfer_id, list(range(64)), num_tokens)

    add(0, 16 * 8)
    turns = []
    for index in range(1, 100):
        add(index, 16)
        clock.advance(1.0)
        taken = sender.book.take(1, layer_bytes, float(layer_bytes))
        assert taken is not None
        turns.append(taken[0].transfer == bytes(16))
    assert not any(turns[:20])
    assert sum(turns) == 3 * 8


def test_shedding_spares_what_is_opened_and_under_way() -> None:
    """Unopened sends go first; opened ones only when asked for, and never one of which something has left."""
    clock = ManualClock()
    cache = Cache(64, 16, seed=0)
    sender = LoopbackNetwork(OPTIONS, clock=clock).sender(cache.memory, FINGERPRINT)
    ids = [f"{index:032x}" for index in range(4)]
    for index, transfer_id in enumerate(ids):
        sender.register(transfer_id, digest=DIGEST, num_tokens=16)
        sender.publish(transfer_id, [index], 16)
        if index != 1:
            body = encode_body(Open(digest=DIGEST, first_token=0, num_tokens=16))
            sender.book.control(
                1, Header(Kind.OPEN, 0, bytes.fromhex(transfer_id), 0, 1, 0, 0, 0, 0, len(body), 0), body
            )
    taken = sender.book.take(1, 96, 0.0)
    assert taken is not None
    under_way = taken[0].transfer.hex()
    sender.shed(ids, 0, unsent_too=False)
    assert [end.transfer_id for end in sender.poll()] == [ids[1]]
    sender.shed(ids, 2, unsent_too=True)
    assert [end.transfer_id for end in sender.poll()] == [ids[3] if under_way != ids[3] else ids[2]]
    sender.shed(ids, 0, unsent_too=True)
    (end,) = sender.poll()
    assert end.reason == Reason.PINNED_BOUND and end.transfer_id != under_way
    assert len(sender.book) == 1


def test_a_frame_beyond_what_decode_takes_is_refused() -> None:
    memory = Cache(4, 16, seed=0).memory
    load = LoadRequest(
        transfer_id="0f" * 16, host="p", port=1, digest=DIGEST, first_token=0, num_tokens=64, block_table=(0, 1, 2, 3)
    )
    session = ReceiveSession(load, 1, 1, memory, ManualClock(), max_payload_bytes=16 * memory.granule_bytes)
    header = Header(Kind.DATA, 0, session.transfer, 1, 1, 0, 1, 0, 16, 16 * memory.granule_bytes, 0)
    assert session.begin(header) is not None
    with pytest.raises(ProtocolError, match="no room"):
        session.begin(header._replace(num_layers=2, first_token=16, payload_bytes=32 * memory.granule_bytes))
