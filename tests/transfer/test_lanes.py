"""Several connections for one pair of workers: striping, ends in the middle of frames, lanes that come, go and lie."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.support import kv_proxy
from tests.support.kv_proxy import KvProxy
from tests.transfer.harness import DIGEST, FINGERPRINT, NUM_LAYERS, PATIENT, WAIT_S, Pair, PairMaker, new_id
from tollbridge.transfer.base import Reason
from tollbridge.transfer.frames import HEADER_BYTES, NO_TRANSFER, Kind, encode_control, parse_header
from tollbridge.transfer.handshake import DialHandshake, Identity, Place
from tollbridge.transfer.tcp import TcpReceiver, TcpSender

STREAMS = 4
NUM_BLOCKS = 1024
TABLE = list(range(NUM_BLOCKS))
NUM_TOKENS = NUM_BLOCKS * 16
TOKEN_BYTES = 512
OPTIONS = replace(PATIENT, streams=STREAMS)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s, pause = time.monotonic() + WAIT_S, threading.Event()
    while not condition():
        assert time.monotonic() < deadline_s
        pause.wait(0.001)


def num_joined(side: object) -> int:
    assert isinstance(side, TcpSender | TcpReceiver)
    return sum(connection.joined for connection in side._side.lanes.connections())


class Rig:
    """A pair with four lanes, all up, through a proxy."""

    def __init__(self, pair: Pair, streams: int = STREAMS) -> None:
        self.pair = pair
        self.proxy = KvProxy(pair.sender.address)
        self.widen(streams)

    def widen(self, streams: int = STREAMS) -> None:
        """Transfer something, so that the lanes are dialled, and wait for them."""
        transfer_id = self.start(16)
        assert [end.outcome for end in self.pair.ends(transfer_id)] == ["done", "done"]
        wait_until(lambda: num_joined(self.pair.sender) == num_joined(self.pair.receiver) == streams)

    def start(self, num_tokens: int = NUM_TOKENS) -> str:
        transfer_id = new_id()
        host, port = self.proxy.address
        self.pair.sender.register(transfer_id, digest=DIGEST, num_tokens=num_tokens)
        self.pair.sender.publish(transfer_id, TABLE, num_tokens)
        self.pair.receiver.open(replace(self.pair.load(transfer_id, TABLE, num_tokens), host=host, port=port))
        return transfer_id

    def meet(self, then: Callable[[], None] = lambda: None) -> threading.Event:
        """Hold each lane behind its first DATA frame until all lanes have had one, then call `then`, once.

        On a busy machine one thread could else send everything before another has run at all.
        """
        waiting = {thread for connection in self.proxy.connections for thread in connection.threads[1:]}
        met = threading.Event()

        def fault(frame: kv_proxy.Frame) -> list[bytes]:
            if frame.is_data:
                if threading.current_thread() not in waiting:
                    met.wait(WAIT_S)
                waiting.discard(threading.current_thread())
                if not waiting and not met.is_set():
                    then()
                    self.proxy.fault = kv_proxy.forward
                    met.set()
            return [frame.data]

        self.proxy.fault = fault
        return met

    def start_and_stall(self) -> str:
        """Begin a transfer and stall all lanes once each has sent something."""
        stalled = self.meet(self.proxy.stall)
        transfer_id = self.start()
        assert stalled.wait(WAIT_S)
        return transfer_id


@pytest.fixture
def rig(make_tcp: PairMaker) -> Iterator[Rig]:
    rig = Rig(make_tcp(OPTIONS, num_blocks=NUM_BLOCKS, token_bytes=TOKEN_BYTES))
    yield rig
    rig.proxy.close()


def test_a_transfer_is_striped(rig: Rig) -> None:
    assert len(rig.proxy.connections) == STREAMS
    expected = rig.pair.send_cache.slots.copy()
    met = rig.meet()
    sent, received = rig.pair.ends(rig.start())
    assert (sent.outcome, received.outcome) == ("done", "done")
    assert np.array_equal(rig.pair.receive_cache.slots, expected)
    assert received.payload_bytes == NUM_TOKENS * NUM_LAYERS * TOKEN_BYTES
    assert (sent.payload_bytes, sent.num_frames) == (received.payload_bytes, received.num_frames)
    assert met.is_set()  # every lane carried frames
    assert rig.pair.sender.statistics().num_connections == STREAMS


def test_many_transfers_over_all_lanes(rig: Rig) -> None:
    ids = [rig.start(4000) for _ in range(12)]
    for transfer_id in ids:
        assert [end.outcome for end in rig.pair.ends(transfer_id)] == ["done", "done"]
    assert len(rig.proxy.connections) == STREAMS


def test_decode_cancels_in_the_middle_of_frames(rig: Rig) -> None:
    transfer_id = rig.start_and_stall()
    rig.pair.receiver.cancel(transfer_id, "the client left")
    assert rig.pair.received.wait(transfer_id).reason == Reason.CANCELLED  # though nothing moves on the wire
    rig.pair.receive_cache.array[:] = 0  # the blocks are the engine's again
    rig.proxy.resume()
    assert rig.pair.sent.wait(transfer_id).reason == Reason.PEER_CANCELLED
    assert [end.outcome for end in rig.pair.ends(rig.start(16))] == ["done", "done"]
    assert not rig.pair.receive_cache.slots[:, 16:].any()
    assert len(rig.proxy.connections) == STREAMS


def test_prefill_cancels_in_the_middle_of_frames(rig: Rig) -> None:
    transfer_id = rig.start_and_stall()
    rig.pair.sender.cancel(transfer_id, "the client left")
    assert rig.pair.sent.wait(transfer_id).reason == Reason.CANCELLED
    rig.pair.send_cache.array[:] = 0  # the blocks are the engine's again; what is still sent was copied
    rig.proxy.resume()
    assert rig.pair.received.wait(transfer_id).reason == Reason.PEER_CANCELLED
    assert len(rig.proxy.connections) == STREAMS


def test_rewind_in_the_middle_of_frames(rig: Rig) -> None:
    expected = rig.pair.send_cache.slots.copy()
    transfer_id = rig.start_and_stall()
    rig.pair.sender.rewind(transfer_id)
    rig.pair.send_cache.slots[:] = np.roll(expected, 16, axis=1)  # block i's KV now lives in block i + 1
    rig.proxy.resume()
    rig.pair.sender.publish(transfer_id, [*TABLE[1:], 0], NUM_TOKENS)
    assert [end.outcome for end in rig.pair.ends(transfer_id)] == ["done", "done"]
    assert np.array_equal(rig.pair.receive_cache.slots, expected)


@pytest.mark.parametrize("lane", range(STREAMS))
def test_a_lost_lane_costs_the_pair(rig: Rig, lane: int) -> None:
    transfer_id = rig.start_and_stall()
    before = rig.proxy.connections[:]
    before[lane].cut()
    received = rig.pair.received.wait(transfer_id)
    assert (received.outcome, received.reason) == ("failed", Reason.PEER_LOST)
    rig.proxy.resume()
    assert rig.pair.sent.wait(transfer_id).reason == Reason.PEER_LOST
    wait_until(lambda: num_joined(rig.pair.sender) == num_joined(rig.pair.receiver) == 0)
    rig.widen()
    assert len(rig.proxy.connections) == 2 * STREAMS
    assert [end.outcome for end in rig.pair.ends(rig.start())] == ["done", "done"]


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_close_in_the_middle_of_frames(rig: Rig, side: str) -> None:
    transfer_id = rig.start_and_stall()
    closing, other = (rig.pair.sender, rig.pair.received) if side == "sender" else (rig.pair.receiver, rig.pair.sent)
    closing.close()
    box = rig.pair.sent if side == "sender" else rig.pair.received
    assert box.wait(transfer_id).reason == Reason.SHUTDOWN
    rig.proxy.resume()
    assert other.wait(transfer_id).reason == Reason.PEER_LOST


def test_a_lane_that_stays_silent_in_the_middle_of_a_frame(make_tcp: PairMaker) -> None:
    """Heartbeats flow on the first lane all the time, and must not hide it."""
    options = replace(OPTIONS, heartbeat_s=0.05, progress_timeout_s=2.0, socket_buffer_bytes=64 * 1024)
    rig = Rig(make_tcp(options, num_blocks=NUM_BLOCKS, token_bytes=TOKEN_BYTES))
    with rig.proxy:
        first, release = rig.proxy.connections[0].threads[1], threading.Event()

        def fault(frame: kv_proxy.Frame) -> list[bytes]:
            if frame.is_data and threading.current_thread() is not first:
                release.wait()  # forwards nothing of this frame
            return [frame.data]

        rig.proxy.fault = fault
        transfer_id = rig.start()
        sent, received = rig.pair.ends(transfer_id)
        assert (sent.outcome, received.outcome) == ("failed", "failed")
        assert Reason.STALLED in (sent.reason, received.reason)
        release.set()


@pytest.mark.parametrize(("prefill", "decode"), [(1, 4), (4, 1), (2, 5)])
def test_the_sides_may_differ_in_streams(make_tcp: PairMaker, prefill: int, decode: int) -> None:
    options = replace(PATIENT, streams=prefill), replace(PATIENT, streams=decode)
    rig = Rig(make_tcp(options[0], receive_options=options[1], num_blocks=NUM_BLOCKS, token_bytes=TOKEN_BYTES), decode)
    with rig.proxy:
        met = rig.meet()
        assert [end.outcome for end in rig.pair.ends(rig.start())] == ["done", "done"]
        assert met.is_set()


def _read(sock: socket.socket, size: int) -> bytes:
    return sock.recv(size, socket.MSG_WAITALL)


def dial(pair: Pair, place: Place, identity: Identity) -> tuple[socket.socket, Kind]:
    """Go through a handshake as a lane; return the socket and the kind of the first frame after READY."""
    sock = socket.create_connection(pair.sender.address)
    hand = DialHandshake(identity, place=place)
    messages = hand.start()
    while True:
        for kind, body in messages:
            sock.sendall(encode_control(kind, NO_TRANSFER, identity.short, 0, body))
        header = parse_header(_read(sock, HEADER_BYTES))
        body = _read(sock, header.payload_bytes)
        if hand.done or header.kind == Kind.REFUSE:
            return sock, Kind(header.kind)
        messages = hand.receive(header.kind, body)


@pytest.mark.parametrize("place", [Place(b"p" * 16, 1), Place(bytes(16), 255)])
def test_a_lane_of_a_pair_that_is_not_here(make_tcp: PairMaker, place: Place) -> None:
    pair = make_tcp()
    sock, kind = dial(pair, place, Identity(fingerprint=FINGERPRINT))
    assert kind == Kind.REFUSE
    sock.close()


def test_a_lane_of_another_process_cannot_join(make_tcp: PairMaker) -> None:
    rig = Rig(make_tcp(OPTIONS, num_blocks=NUM_BLOCKS, token_bytes=TOKEN_BYTES))
    with rig.proxy:
        first = rig.pair.receiver._side.lanes.connections()[0]  # type: ignore[attr-defined]
        sock, kind = dial(rig.pair, Place(first.place.pair, 7), Identity(fingerprint=FINGERPRINT))
        assert kind == Kind.REFUSE
        sock.close()
        assert [end.outcome for end in rig.pair.ends(rig.start())] == ["done", "done"]
