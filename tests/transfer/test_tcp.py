"""What only TCP has: secrets, connections, names, cancels in the middle of a frame, the bandwidth cap, processes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.support import kv_proxy
from tests.support.kv_proxy import KvProxy
from tests.transfer.harness import (
    DIGEST,
    FINGERPRINT,
    PATIENT,
    SHORT,
    WAIT_S,
    Cache,
    Mailbox,
    Pair,
    PairMaker,
    make_pair,
    new_id,
)
from tollbridge.errors import ConfigError, StartupError, TransferError
from tollbridge.transfer.base import Reason
from tollbridge.transfer.frames import HEADER_BYTES
from tollbridge.transfer.options import TransferOptions, is_loopback
from tollbridge.transfer.send_book import SendBook
from tollbridge.transfer.tcp import TcpReceiver, TcpSender

TABLE = list(range(64))
BIG_BLOCKS = 1024
BIG_TABLE = list(range(BIG_BLOCKS))
BIG_TOKENS = BIG_BLOCKS * 16


def transfer(pair: Pair, num_tokens: int = 100) -> tuple[str, str]:
    transfer_id = new_id()
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=num_tokens)
    pair.sender.publish(transfer_id, TABLE, num_tokens)
    pair.receiver.open(pair.load(transfer_id, TABLE, num_tokens))
    sent, received = pair.ends(transfer_id)
    return sent.outcome, received.outcome


def test_one_connection_serves_many_transfers(make_tcp: PairMaker) -> None:
    pair = make_tcp()
    for _ in range(5):
        assert transfer(pair) == ("done", "done")
    assert pair.receiver.statistics().num_connections == 1
    assert pair.sender.statistics().num_connections == 1
    assert pair.sender.statistics().payload_bytes == pair.receiver.statistics().payload_bytes
    assert pair.sender.statistics().wire_bytes == pair.receiver.statistics().wire_bytes


@pytest.mark.parametrize("theirs", [b"another secret", None])
def test_wrong_secret(make_tcp: PairMaker, theirs: bytes | None) -> None:
    pair = make_tcp(TransferOptions(secret=b"secret"), receive_options=TransferOptions(secret=theirs))
    transfer_id = new_id()
    pair.receiver.open(pair.load(transfer_id, TABLE, 100))
    received = pair.received.wait(transfer_id)
    assert (received.outcome, received.reason) == ("failed", Reason.HANDSHAKE)
    assert "TOLLBRIDGE_SECRET" in received.detail
    assert pair.receiver.statistics().num_connections == 0


def test_same_secret(make_tcp: PairMaker) -> None:
    assert transfer(make_tcp(TransferOptions(secret=b"secret"))) == ("done", "done")


def test_a_name_is_resolved(make_tcp: PairMaker) -> None:
    pair, transfer_id = make_tcp(), new_id()
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=10)
    pair.sender.publish(transfer_id, TABLE, 10)
    pair.receiver.open(replace(pair.load(transfer_id, TABLE, 10), host="localhost"))
    assert [end.outcome for end in pair.ends(transfer_id)] == ["done", "done"]


def test_a_name_that_does_not_exist(make_tcp: PairMaker) -> None:
    pair, transfer_id = make_tcp(), new_id()
    pair.receiver.open(replace(pair.load(transfer_id, TABLE, 10), host="nowhere.invalid"))
    received = pair.received.wait(transfer_id)
    assert received.reason == Reason.PEER_LOST
    assert "nowhere.invalid" in received.detail


def test_a_reachable_listener_needs_a_secret() -> None:
    cache = Cache(4, 16, seed=0)
    with pytest.raises(ConfigError, match="TOLLBRIDGE_SECRET"):
        TcpSender(cache.memory, FINGERPRINT, TransferOptions(bind_host="0.0.0.0"))


def test_a_taken_port_is_a_start_up_error(make_tcp: PairMaker) -> None:
    pair = make_tcp()
    with pytest.raises(StartupError, match="cannot be bound"):
        TcpSender(pair.send_cache.memory, FINGERPRINT, TransferOptions(bind_port=pair.sender.address[1]))


def test_the_advertised_host_is_what_address_says() -> None:
    cache = Cache(4, 16, seed=0)
    sender = TcpSender(cache.memory, FINGERPRINT, TransferOptions(advertise_host="node-a"))
    assert sender.address[0] == "node-a"
    sender.close()
    sender.close()  # idempotent


def test_a_restarted_prefill_worker_is_dialled_again() -> None:
    first = make_pair("tcp")
    assert transfer(first) == ("done", "done")
    port = first.sender.address[1]
    first.sender.close()
    cache = Cache(64, 16, seed=3)
    sender = TcpSender(cache.memory, FINGERPRINT, TransferOptions(bind_port=port))
    second = Pair("tcp", cache, first.receive_cache, sender, first.receiver)
    assert transfer(second) == ("done", "done")
    assert np.array_equal(cache.tokens(TABLE, 0, 100), first.receive_cache.tokens(TABLE, 0, 100))
    second.close()


def test_a_restarted_decode_worker_is_served_again() -> None:
    first = make_pair("tcp")
    transfer_id = new_id()
    first.sender.register(transfer_id, digest=DIGEST, num_tokens=100)
    first.receiver.open(first.load(transfer_id, TABLE, 100))
    assert transfer(first) == ("done", "done")  # so the open has been taken
    first.receiver.close()
    assert first.sent.wait(transfer_id).reason == Reason.PEER_LOST
    cache = Cache(64, 16, seed=3)
    second = Pair("tcp", first.send_cache, cache, first.sender, TcpReceiver(cache.memory, FINGERPRINT))
    assert transfer(second) == ("done", "done")
    assert np.array_equal(cache.tokens(TABLE, 0, 100), first.send_cache.tokens(TABLE, 0, 100))
    second.close()


def test_a_second_open_from_another_connection_is_refused(make_tcp: PairMaker) -> None:
    pair, transfer_id = make_tcp(), new_id()
    other = TcpReceiver(pair.receive_cache.memory, FINGERPRINT)
    box = Mailbox(other)
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=10)
    pair.receiver.open(pair.load(transfer_id, TABLE, 10))
    assert transfer(pair) == ("done", "done")  # so the first OPEN has been taken
    other.open(pair.load(transfer_id, TABLE, 10))
    refused = box.wait(transfer_id)
    assert (refused.outcome, refused.reason) == ("failed", Reason.PROTOCOL)
    assert "already open" in refused.detail
    pair.sender.publish(transfer_id, TABLE, 10)
    assert [end.outcome for end in pair.ends(transfer_id)] == ["done", "done"]
    other.close()


def test_pending_opens_are_bounded(make_tcp: PairMaker) -> None:
    pair = make_tcp(TransferOptions(max_pending_opens=2))
    ids = [new_id() for _ in range(3)]
    for transfer_id in ids:
        pair.receiver.open(pair.load(transfer_id, TABLE, 10))
    assert pair.received.wait(ids[2]).reason == Reason.UNKNOWN
    for transfer_id in ids[:2]:
        pair.sender.register(transfer_id, digest=DIGEST, num_tokens=10)
        pair.sender.publish(transfer_id, TABLE, 10)
        assert [end.outcome for end in pair.ends(transfer_id)] == ["done", "done"]


class Midway:
    """A big transfer through a proxy that is stalled once DATA flows: some of a frame is out, the rest waits."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.transfer_id = new_id()
        self.proxy = KvProxy(pair.sender.address, fault=self._stall)
        host, port = self.proxy.address
        pair.sender.register(self.transfer_id, digest=DIGEST, num_tokens=BIG_TOKENS)
        pair.receiver.open(replace(pair.load(self.transfer_id, BIG_TABLE, BIG_TOKENS), host=host, port=port))
        pair.sender.publish(self.transfer_id, BIG_TABLE, BIG_TOKENS)
        assert self.proxy.data_seen.wait(WAIT_S)

    def _stall(self, frame: kv_proxy.Frame) -> list[bytes]:
        if frame.is_data and self.proxy.fault == self._stall:
            self.proxy.stall()
            self.proxy.fault = kv_proxy.forward
        return [frame.data]


def test_a_network_that_takes_nothing_while_prefill_sends(make_tcp: PairMaker) -> None:
    pair = make_tcp(SHORT, num_blocks=BIG_BLOCKS, token_bytes=1024)
    midway = Midway(pair)
    with midway.proxy:
        sent, received = pair.ends(midway.transfer_id)
        assert (sent.outcome, received.outcome) == ("failed", "failed")
        assert received.reason == Reason.STALLED


def make_big(make_tcp: PairMaker, **options: float) -> Pair:
    return make_tcp(replace(PATIENT, **options), num_blocks=BIG_BLOCKS, token_bytes=1024)  # type: ignore[arg-type]


def test_prefill_cancels_in_the_middle_of_a_frame(make_tcp: PairMaker) -> None:
    pair = make_big(make_tcp)
    midway = Midway(pair)
    with midway.proxy:
        pair.sender.cancel(midway.transfer_id, "the client left")
        assert pair.sent.wait(midway.transfer_id).reason == Reason.CANCELLED  # though nothing flows
        pair.send_cache.array[:] = 0  # the blocks are the engine's again; what is still sent was copied
        midway.proxy.resume()
        received = pair.received.wait(midway.transfer_id)
        assert (received.outcome, received.reason) == ("failed", Reason.PEER_CANCELLED)
        assert transfer(pair) == ("done", "done")


def test_decode_cancels_in_the_middle_of_a_frame(make_tcp: PairMaker) -> None:
    pair = make_big(make_tcp)
    midway = Midway(pair)
    with midway.proxy:
        pair.receiver.cancel(midway.transfer_id, "the client left")
        assert pair.received.wait(midway.transfer_id).reason == Reason.CANCELLED
        pair.receive_cache.array[:] = 0  # the blocks are the engine's again
        midway.proxy.resume()
        assert pair.sent.wait(midway.transfer_id).reason == Reason.PEER_CANCELLED
        transfer_id = new_id()  # the same connection goes on, and nothing was written after the end
        host, port = midway.proxy.address
        pair.sender.register(transfer_id, digest=DIGEST, num_tokens=16)
        pair.sender.publish(transfer_id, [0], 16)
        pair.receiver.open(replace(pair.load(transfer_id, [BIG_BLOCKS - 1], 16), host=host, port=port))
        assert [end.outcome for end in pair.ends(transfer_id)] == ["done", "done"]
        assert not pair.receive_cache.slots[:, : BIG_TOKENS - 16].any()
        (connection,) = midway.proxy.connections
        assert connection.bytes_to_decode < BIG_TOKENS * 3 * 1024  # the wire stopped


def test_rewind_in_the_middle_of_a_frame(make_tcp: PairMaker) -> None:
    """What was sent stays valid though the engine reuses the blocks at once; the rest comes from other blocks."""
    pair = make_big(make_tcp)
    expected = pair.send_cache.slots.copy()
    midway = Midway(pair)
    with midway.proxy:
        pair.sender.rewind(midway.transfer_id)
        moved = np.roll(pair.send_cache.slots.copy(), 16, axis=1)  # block i's KV now lives in block i + 1
        pair.send_cache.slots[:] = moved
        midway.proxy.resume()
        pair.sender.publish(midway.transfer_id, [*BIG_TABLE[1:], 0], BIG_TOKENS)
        assert [end.outcome for end in pair.ends(midway.transfer_id)] == ["done", "done"]
    assert np.array_equal(pair.receive_cache.slots, expected)


@pytest.mark.parametrize("closed", ["sender", "receiver"])
def test_close_in_the_middle_of_a_frame(make_tcp: PairMaker, closed: str) -> None:
    pair = make_big(make_tcp)
    midway = Midway(pair)
    with midway.proxy:
        if closed == "sender":
            pair.sender.close()
            assert pair.sent.wait(midway.transfer_id).reason == Reason.SHUTDOWN
            midway.proxy.resume()
            assert pair.received.wait(midway.transfer_id).reason == Reason.PEER_LOST
        else:
            pair.receiver.close()
            assert pair.received.wait(midway.transfer_id).reason == Reason.SHUTDOWN
            pair.receive_cache.array[:] = 0
            midway.proxy.resume()
            assert pair.sent.wait(midway.transfer_id).reason == Reason.PEER_LOST
            assert not pair.receive_cache.array.any()


def test_a_trickle_is_progress(make_tcp: PairMaker) -> None:
    """Decode is not woken for a few bytes of a payload, and hears of them all the same."""
    pair = make_big(make_tcp)
    pieces, end = [threading.Event(), threading.Event()], HEADER_BYTES + 1000

    def trickle(frame: kv_proxy.Frame) -> Iterator[bytes]:
        if not frame.is_data:
            yield frame.data
            return
        yield frame.data[:end]
        pieces[0].wait(WAIT_S)
        yield frame.data[end : end + 1000]
        pieces[1].wait(WAIT_S)
        yield frame.data[end + 1000 :]

    with KvProxy(pair.sender.address, fault=trickle) as proxy:
        transfer_id, (host, port) = new_id(), proxy.address
        pair.sender.register(transfer_id, digest=DIGEST, num_tokens=BIG_TOKENS)
        pair.receiver.open(replace(pair.load(transfer_id, BIG_TABLE, BIG_TOKENS), host=host, port=port))
        pair.sender.publish(transfer_id, BIG_TABLE, BIG_TOKENS)
        connections = pair.receiver._side.lanes.connections  # type: ignore[attr-defined]
        pair.wait_until(lambda: any(each.in_frame for each in connections()))
        first = next(each for each in connections() if each.in_frame)
        pair.wait_until(lambda: first.channel._awaited_bytes > 1)
        heard_s = first.heard_s
        pieces[0].set()
        pair.wait_until(lambda: first.heard_s > heard_s)
        pieces[1].set()
        assert [end.outcome for end in pair.ends(transfer_id)] == ["done", "done"]


def test_a_short_transfer_overtakes_a_long_one(make_tcp: PairMaker) -> None:
    pair = make_big(make_tcp, bandwidth_cap_bytes_per_s=3e6)  # seventeen seconds for the long one
    long_id, short_id = new_id(), new_id()
    pair.sender.register(long_id, digest=DIGEST, num_tokens=BIG_TOKENS)
    pair.sender.publish(long_id, BIG_TABLE, BIG_TOKENS)
    pair.receiver.open(pair.load(long_id, BIG_TABLE, BIG_TOKENS))
    pair.sender.register(short_id, digest=DIGEST, num_tokens=16)
    pair.sender.publish(short_id, [0], 16)
    pair.receiver.open(pair.load(short_id, [0], 16))
    assert pair.received.wait(short_id).outcome == "done"
    pair.received.collect()
    assert long_id not in pair.received.ends
    pair.receiver.cancel(long_id, "enough")
    assert pair.sent.wait(long_id).reason == Reason.PEER_CANCELLED


def test_the_bandwidth_cap_holds(make_tcp: PairMaker) -> None:
    pair = make_big(make_tcp, bandwidth_cap_bytes_per_s=40e6)
    transfer_id, num_tokens = new_id(), 4096  # 12.6 MB: 0.31 s at the cap
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=num_tokens)
    pair.sender.publish(transfer_id, BIG_TABLE, num_tokens)
    pair.receiver.open(pair.load(transfer_id, BIG_TABLE, num_tokens))
    sent, received = pair.ends(transfer_id)
    assert received.outcome == "done"
    assert received.payload_bytes / received.total_s < 1.2 * 40e6
    assert sent.total_s > 0.25


def test_the_engine_is_told_from_any_thread(make_tcp: PairMaker) -> None:
    pair, told = make_tcp(), threading.Event()
    pair.receiver.set_listener(told.set)
    transfer_id = new_id()
    pair.receiver.open(pair.load(transfer_id, TABLE, 100))
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=100)
    pair.sender.publish(transfer_id, TABLE, 100)
    assert told.wait(WAIT_S)
    assert [end.transfer_id for end in pair.receiver.poll()] == [transfer_id]


PREFILL = """
import sys
from tests.transfer.harness import Cache, DIGEST, FINGERPRINT
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.send_book import SendBook
from tollbridge.transfer.tcp import TcpSender
sender = TcpSender(Cache(64, 16, seed=1).memory, FINGERPRINT, TransferOptions(heartbeat_s=0.05))
print(sender.address[1], flush=True)
for line in sys.stdin:
    transfer_id, num_tokens = line.split()
    sender.register(transfer_id, digest=DIGEST, num_tokens=100)
    sender.publish(transfer_id, list(range(64)), int(num_tokens))
"""


def test_prefill_in_another_process_is_killed(make_tcp: PairMaker) -> None:
    pair = make_tcp(PATIENT)
    with subprocess.Popen([sys.executable, "-c", PREFILL], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        port = int(process.stdout.readline())
        whole, half = new_id(), new_id()
        for transfer_id, published in ((whole, 100), (half, 50)):
            process.stdin.write(f"{transfer_id} {published}\n".encode())
            process.stdin.flush()
            pair.receiver.open(replace(pair.load(transfer_id, TABLE, 100), port=port))
        assert pair.received.wait(whole).outcome == "done"
        assert np.array_equal(pair.send_cache.tokens(TABLE, 0, 100), pair.receive_cache.tokens(TABLE, 0, 100))
        process.kill()
        received = pair.received.wait(half)
        assert (received.outcome, received.reason) == ("failed", Reason.PEER_LOST)


def test_a_bug_in_the_io_thread_ends_everything(make_tcp: PairMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, transfer_id = make_tcp(), new_id()
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=10)
    monkeypatch.setattr(SendBook, "publish", lambda *args: 1 / 0)
    pair.sender.publish(transfer_id, TABLE, 10)
    assert pair.sent.wait(transfer_id).reason == Reason.SHUTDOWN
    with pytest.raises(TransferError, match="closed"):
        pair.sender.register(new_id(), digest=DIGEST, num_tokens=10)


def test_goodput_of_the_link(make_tcp: PairMaker) -> None:
    pair = make_big(make_tcp)
    transfer_id = new_id()
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=BIG_TOKENS)
    pair.sender.publish(transfer_id, BIG_TABLE, BIG_TOKENS)
    assert pair.sender.statistics().goodput_bytes_per_s == 0
    pair.receiver.open(pair.load(transfer_id, BIG_TABLE, BIG_TOKENS))
    for side, end in zip((pair.sender, pair.receiver), pair.ends(transfer_id), strict=True):
        assert end.outcome == "done"
        assert side.statistics().goodput_bytes_per_s > 0.5 * end.payload_bytes / end.total_s


def test_is_loopback() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "127.9.9.9"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "node-a"))
