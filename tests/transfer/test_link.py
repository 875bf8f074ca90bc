"""On a shaped link between two hosts: how soon a cancel is felt."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from tests.support.netns import sent_bytes
from tests.support.timing import TRIES
from tests.transfer.harness import DIGEST, FINGERPRINT, WAIT_S, Cache, Mailbox, new_id
from tollbridge.bench.netns import ADDRESSES, Link, LinkUnavailableError, link, on_host
from tollbridge.transfer.base import LoadRequest
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.tcp import TcpReceiver, TcpSender

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

TOKEN_BYTES = 8192
SECRET = b"link"
MAX_STOP_S = 0.1
QUIET_S = 0.25  # nothing but heartbeats for so long: the wire has stopped
NOISE_BYTES = 2000  # of heartbeats and acknowledgements between two looks


@pytest.fixture(scope="module")
def wire() -> Iterator[Link]:
    try:
        with link() as made:
            yield made
    except LinkUnavailableError as error:
        pytest.skip(str(error))


class Hosts:
    """Prefill on host a, decode on host b. The tables name the same few blocks again and again: long and small."""

    def __init__(self, wire: Link) -> None:
        self._wire = wire
        self.send_cache = Cache(8, 16, seed=1, token_bytes=TOKEN_BYTES)
        self.receive_cache = Cache(8, 16, seed=2, token_bytes=TOKEN_BYTES)
        with on_host(wire, "a"):
            options = TransferOptions(bind_host=ADDRESSES["a"], secret=SECRET)
            self.sender = TcpSender(self.send_cache.memory, FINGERPRINT, options)
        with on_host(wire, "b"):
            self.receiver = TcpReceiver(self.receive_cache.memory, FINGERPRINT, TransferOptions(secret=SECRET))
        self.sent, self.received = Mailbox(self.sender), Mailbox(self.receiver)

    def start(self, seconds: float, bytes_per_s: float) -> str:
        """Begin a transfer that takes so long."""
        transfer_id = new_id()
        num_blocks = int(seconds * bytes_per_s / (3 * 16 * TOKEN_BYTES)) + 1
        table = [index % 8 for index in range(num_blocks)]
        self.sender.register(transfer_id, digest=DIGEST, num_tokens=16 * num_blocks)
        self.sender.publish(transfer_id, table, 16 * num_blocks)
        host, port = self.sender.address
        self.receiver.open(
            LoadRequest(
                transfer_id=transfer_id,
                host=host,
                port=port,
                digest=DIGEST,
                first_token=0,
                num_tokens=16 * num_blocks,
                block_table=table,
            )
        )
        return transfer_id

    def run_for(self, seconds: float) -> None:
        """Watch the link until it has been busy for so long."""
        before = sent_bytes(self._wire, "a")
        deadline_s = time.monotonic() + WAIT_S
        while sent_bytes(self._wire, "a") - before < 100_000:
            assert time.monotonic() < deadline_s, "nothing is sent"
            time.sleep(0.002)
        time.sleep(seconds)

    def wait_quiet(self) -> float:
        """Return when (monotonic) the last KV was put on the wire."""
        last_s, before = time.monotonic(), sent_bytes(self._wire, "a")
        while (now_s := time.monotonic()) - last_s < QUIET_S:
            time.sleep(0.002)
            now = sent_bytes(self._wire, "a")
            if now - before > NOISE_BYTES:
                last_s = now_s
            before = now
        return last_s

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()


@pytest.mark.parametrize("side", ["decode", "prefill"])
@pytest.mark.parametrize(
    ("rate", "bytes_per_s", "burst"), [("30mbit", 3.75e6, "32kb"), ("1gbit", 125e6, "256kb")], ids=["30mbit", "1gbit"]
)
def test_a_cancel_stops_the_wire(wire: Link, rate: str, bytes_per_s: float, burst: str, side: str) -> None:
    """Within 100 ms, and both engines hear of the end at once. A machine with other work may take some tries."""
    wire.shape(rate, burst=burst)
    for _ in range(TRIES):
        ended_s, both_s, stopped_s = cancel_in_the_middle(wire, bytes_per_s, side)
        print(f"{rate}, {side}: ended after {ended_s:.4f} s, both {both_s:.4f} s, wire quiet {stopped_s:.4f} s")
        if max(stopped_s, ended_s) <= MAX_STOP_S:
            return
    raise AssertionError(f"never within {MAX_STOP_S} s")


def cancel_in_the_middle(wire: Link, bytes_per_s: float, side: str) -> tuple[float, float, float]:
    """Return the seconds until the side that cancels has its end, until both have, and until the wire is quiet."""
    hosts = Hosts(wire)
    try:
        with on_host(wire, "a"):
            transfer_id = hosts.start(5.0, bytes_per_s)
            hosts.run_for(0.5)
            begun_s = time.monotonic()
            if side == "decode":
                hosts.receiver.cancel(transfer_id, "the client left")
                end, other = hosts.received, hosts.sent
            else:
                hosts.sender.cancel(transfer_id, "the client left")
                end, other = hosts.sent, hosts.received
            assert end.wait(transfer_id).outcome == "cancelled"
            ended_s = time.monotonic() - begun_s
            assert other.wait(transfer_id).outcome in ("cancelled", "failed")
            both_s = time.monotonic() - begun_s
            return ended_s, both_s, hosts.wait_quiet() - begun_s
    finally:
        hosts.close()
