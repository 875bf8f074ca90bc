"""What a broken network or a dying worker does to TCP: never wrong, never stuck, and only the victims fail."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.support import kv_proxy
from tests.support.kv_proxy import KvProxy
from tests.transfer.harness import DIGEST, NUM_LAYERS, PATIENT, SHORT, TOKEN_BYTES, WAIT_S, Pair, PairMaker, new_id
from tollbridge.transfer.base import Reason, TransferEnd
from tollbridge.transfer.frames import HEADER_BYTES, MAX_PAYLOAD_BYTES
from tollbridge.transfer.options import TransferOptions

NUM_TOKENS = 1000
TABLE = list(range(64))
OPTIONS = replace(PATIENT, min_frame_bytes=4096, max_frame_bytes=16384)


class Rig:
    """A pair with a proxy in between."""

    def __init__(self, pair: Pair, fault: kv_proxy.Fault = kv_proxy.forward) -> None:
        self.pair = pair
        self.proxy = KvProxy(pair.sender.address, fault=fault)

    def start(self, num_tokens: int = NUM_TOKENS, *, publish: int | None = None) -> str:
        transfer_id = new_id()
        host, port = self.proxy.address
        load = self.pair.load(transfer_id, TABLE, num_tokens)
        self.pair.sender.register(transfer_id, digest=DIGEST, num_tokens=num_tokens)
        self.pair.receiver.open(replace(load, host=host, port=port))
        self.pair.sender.publish(transfer_id, TABLE, num_tokens if publish is None else publish)
        return transfer_id

    def finish(self, transfer_id: str, num_tokens: int = NUM_TOKENS) -> tuple[TransferEnd, TransferEnd]:
        """Wait for both ends; what is done must be right."""
        sent, received = self.pair.ends(transfer_id)
        if received.outcome == "done":
            expected = self.pair.send_cache.tokens(TABLE, 0, num_tokens)
            assert np.array_equal(self.pair.receive_cache.tokens(TABLE, 0, num_tokens), expected)
        return sent, received


@pytest.fixture
def rig(make_tcp: PairMaker) -> Iterator[Rig]:
    rig = Rig(make_tcp(OPTIONS))
    yield rig
    rig.proxy.close()


def test_bytes_on_the_wire_are_what_both_sides_report(rig: Rig) -> None:
    sent, received = rig.finish(rig.start())
    payload = NUM_TOKENS * NUM_LAYERS * TOKEN_BYTES
    assert sent.payload_bytes == received.payload_bytes == payload
    assert sent.num_frames == received.num_frames > NUM_LAYERS
    (connection,) = rig.proxy.connections
    total = connection.bytes_to_decode + connection.bytes_to_prefill
    handshake_and_pings = total - received.wire_bytes
    assert 5 * HEADER_BYTES < handshake_and_pings < 5 * HEADER_BYTES + 2000


def test_a_flipped_bit_fails_that_transfer_only(rig: Rig) -> None:
    rig.proxy.fault = kv_proxy.corrupt_payload(3)
    sent, received = rig.finish(rig.start())
    assert (sent.outcome, sent.reason) == ("failed", Reason.CHECKSUM)
    assert (received.outcome, received.reason) == ("failed", Reason.CHECKSUM)
    assert "arrived damaged" in received.detail
    assert [end.outcome for end in rig.finish(rig.start())] == ["done", "done"]
    assert len(rig.proxy.connections) == 1  # the connection survived


def test_a_flipped_bit_among_concurrent_transfers(rig: Rig) -> None:
    rig.proxy.fault = kv_proxy.corrupt_payload(5)
    ids = [rig.start(publish=0) for _ in range(4)]
    for transfer_id in ids:
        rig.pair.sender.publish(transfer_id, TABLE, NUM_TOKENS)
    outcomes = [rig.finish(transfer_id)[1].outcome for transfer_id in ids]
    assert sorted(outcomes) == ["done", "done", "done", "failed"]


def test_a_damaged_header_costs_the_connection(rig: Rig) -> None:
    rig.proxy.fault = kv_proxy.corrupt_header(2)
    sent, received = rig.finish(rig.start())
    assert received.reason == Reason.PROTOCOL
    assert sent.reason in (Reason.PROTOCOL, Reason.PEER_LOST)
    assert "checksum does not fit" in received.detail
    assert [end.outcome for end in rig.finish(rig.start())] == ["done", "done"]
    assert len(rig.proxy.connections) == 2


def test_duplicates_are_ignored(rig: Rig) -> None:
    rig.proxy.fault = kv_proxy.duplicate_data()
    sent, received = rig.finish(rig.start())
    assert (sent.outcome, received.outcome) == ("done", "done")
    assert [end.outcome for end in rig.finish(rig.start())] == ["done", "done"]  # late copies hit no one


def test_order_does_not_matter(rig: Rig) -> None:
    rig.proxy.fault = kv_proxy.reorder_data()
    assert [end.outcome for end in rig.finish(rig.start())] == ["done", "done"]


@pytest.mark.parametrize(
    "fields",
    [{"layer": NUM_LAYERS}, {"first_token": NUM_TOKENS}, {"num_tokens": 1}],
    ids=["layer", "range", "size"],
)
def test_a_frame_that_was_not_asked_for(rig: Rig, fields: dict[str, int]) -> None:
    rig.proxy.fault = kv_proxy.rewrite_header(1, **fields)
    sent, received = rig.finish(rig.start())
    assert (sent.reason, received.reason) == (Reason.PROTOCOL, Reason.PROTOCOL)
    assert [end.outcome for end in rig.finish(rig.start())] == ["done", "done"]


@pytest.mark.parametrize("fields", [{"transfer": b"x" * 16}, {"epoch": 77}], ids=["transfer", "epoch"])
def test_a_frame_of_nobody_is_drained(make_tcp: PairMaker, fields: dict[str, int | bytes]) -> None:
    """The range is missing then: prefill notices that decode never confirms."""
    rig = Rig(make_tcp(replace(OPTIONS, progress_timeout_s=0.5)), kv_proxy.rewrite_header(1, **fields))
    with rig.proxy:
        sent, received = rig.finish(rig.start())
        assert (sent.reason, received.reason) == (Reason.STALLED, Reason.STALLED)


def test_a_frame_of_another_process_costs_the_connection(rig: Rig) -> None:
    rig.proxy.fault = kv_proxy.rewrite_header(1, incarnation=1)
    assert "another process" in rig.finish(rig.start())[1].detail


def test_an_absurd_size_costs_the_connection(rig: Rig) -> None:
    rig.proxy.fault = kv_proxy.rewrite_header(1, payload_bytes=MAX_PAYLOAD_BYTES + 1)
    assert rig.finish(rig.start())[1].reason == Reason.PROTOCOL


@pytest.mark.parametrize("keep_bytes", [0, 10, HEADER_BYTES, HEADER_BYTES + 1000])
def test_a_connection_cut_in_the_middle_of_a_frame(rig: Rig, keep_bytes: int) -> None:
    rig.proxy.fault = kv_proxy.truncate(2, keep_bytes)
    sent, received = rig.finish(rig.start())
    assert (sent.outcome, received.outcome) == ("failed", "failed")
    assert (sent.reason, received.reason) == (Reason.PEER_LOST, Reason.PEER_LOST)
    rig.proxy.fault = kv_proxy.forward
    assert [end.outcome for end in rig.finish(rig.start())] == ["done", "done"]


def test_a_cut_while_prefill_computes(rig: Rig) -> None:
    transfer_id = rig.start(publish=100)
    assert rig.proxy.data_seen.wait(WAIT_S)
    rig.proxy.cut()
    sent, received = rig.finish(transfer_id)
    assert (sent.reason, received.reason) == (Reason.PEER_LOST, Reason.PEER_LOST)
    rig.pair.sender.publish(transfer_id, TABLE, NUM_TOKENS)  # the engine has not polled yet: ignored


def test_a_silent_network(make_tcp: PairMaker) -> None:
    """Nothing passes, nothing is closed: both sides give up by themselves, and the next transfer dials anew."""
    rig = Rig(make_tcp(replace(SHORT, progress_timeout_s=3.0)))  # and long enough for the next transfer
    with rig.proxy:
        transfer_id = rig.start(publish=100)
        assert rig.proxy.data_seen.wait(WAIT_S)
        rig.proxy.stall()
        sent, received = rig.finish(transfer_id)
        assert (sent.outcome, received.outcome) == ("failed", "failed")
        assert received.reason == Reason.STALLED
        assert sent.reason in (Reason.STALLED, Reason.PEER_LOST)
        rig.proxy.resume()
        assert [end.outcome for end in rig.finish(rig.start())] == ["done", "done"]
        assert len(rig.proxy.connections) == 2


def test_a_listener_that_never_answers(make_tcp: PairMaker) -> None:
    pair = make_tcp(replace(SHORT, handshake_timeout_s=0.3))
    with socket.create_server(("127.0.0.1", 0)) as mute:
        transfer_id = new_id()
        load = replace(pair.load(transfer_id, TABLE, 10), port=mute.getsockname()[1])
        pair.receiver.open(load)
        received = pair.received.wait(transfer_id)
    assert (received.outcome, received.reason) == ("failed", Reason.HANDSHAKE)
    assert "within 0.3 s" in received.detail


def test_a_dialler_that_never_speaks_or_speaks_nonsense(make_tcp: PairMaker) -> None:
    pair = make_tcp(replace(SHORT, handshake_timeout_s=0.2))
    with socket.create_connection(pair.sender.address) as mute, socket.create_connection(pair.sender.address) as rude:
        rude.sendall(b"GET / HTTP/1.1\r\nHost: prefill\r\nUser-Agent: a long enough first line\r\n\r\n")
        for sock in (rude, mute):
            sock.settimeout(WAIT_S)
            said = b""
            while data := _recv(sock):
                said += data
            assert b"TBKV" in said or not said  # a refusal at most, then the end
    assert pair.sender.statistics().num_connections == 0


def test_too_many_strangers_are_turned_away(make_tcp: PairMaker) -> None:
    pair = make_tcp(TransferOptions(max_unauthenticated=2))
    socks = [socket.create_connection(pair.sender.address) for _ in range(3)]
    socks[2].settimeout(WAIT_S)
    assert _recv(socks[2]) == b""
    for sock in socks:
        sock.close()


def _recv(sock: socket.socket) -> bytes:
    try:
        return sock.recv(4096)
    except ConnectionError:
        return b""


def test_zeros_with_fitting_checksums_pass_the_transport(rig: Rig) -> None:
    """What checksums cannot see; the proxy offers it to tests that compare tokens."""
    rig.proxy.fault = kv_proxy.zero_payloads()
    transfer_id = rig.start()
    assert [end.outcome for end in rig.pair.ends(transfer_id)] == ["done", "done"]
    assert not rig.pair.receive_cache.tokens(TABLE, 0, NUM_TOKENS).any()
