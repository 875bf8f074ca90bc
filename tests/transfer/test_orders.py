"""What an engine's process and its I/O process say to each other."""

from __future__ import annotations

import socket

import pytest

from tests.transfer.harness import FINGERPRINT
from tollbridge.transfer.base import LoadRequest
from tollbridge.transfer.channel import TlsFiles
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.orders import Load, Order, Pipe, Publish, Start, orders
from tollbridge.transfer.shared import Layout

LAYOUT = Layout(num_layers=2, num_blocks=3, block_size=4, token_bytes=8, granule=2)
OPTIONS = TransferOptions(secret=b"s" * 32, tls=TlsFiles(cert="c", key="k", ca="a"), streams=3, frame_s=0.01)
LOAD = LoadRequest(
    transfer_id="00" * 16, host="h", port=1, digest=b"d" * 16, first_token=0, num_tokens=9, block_table=(1, 2)
)


@pytest.mark.parametrize(
    "order",
    [
        Start("send", OPTIONS, FINGERPRINT, LAYOUT, 20),
        Publish("00" * 16, tuple(range(100_000)), 12, None),
        Load(LOAD),
    ],
    ids=["start", "publish", "load"],
)
def test_orders_arrive_as_they_were_given(order: Order) -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    there, here = Pipe(theirs), Pipe(ours)
    here.send(order)
    data = there.receive()
    assert data is not None
    received = orders.decode(data)
    if isinstance(received, Load):
        assert tuple(received.request.block_table) == (1, 2)
        assert received.request.digest == LOAD.digest
    else:
        assert received == order
    here.close()
    assert there.receive() is None
    there.close()


def test_what_was_said_before_the_end_still_arrives() -> None:
    ours, theirs = socket.socketpair()
    there, here = Pipe(theirs), Pipe(ours)
    here.send(Load(LOAD))
    here.shut()
    assert there.receive() is not None
    assert there.receive() is None
    there.send(Load(LOAD))  # the other direction is open
    assert here.receive() is not None
    here.close()
    there.close()


def test_who_takes_nothing_is_given_up() -> None:
    ours, theirs = socket.socketpair()
    here = Pipe(ours, send_timeout_s=0.2)
    with pytest.raises(TimeoutError, match="takes nothing"):
        for _ in range(10_000):
            here.send(Load(LOAD))
    there = Pipe(theirs)
    assert there.receive() is not None  # reading has no such bound, here or there
    there.send(Load(LOAD))
    assert here.receive() is not None
    here.close()
    there.close()


@pytest.mark.parametrize("num_bytes", [2, 4, 40])
def test_half_a_message_is_the_end_of_one_who_died(num_bytes: int) -> None:
    ours, theirs = socket.socketpair()
    there, here = Pipe(theirs), Pipe(ours)
    here.send(Load(LOAD))
    whole = theirs.recv(1 << 16)
    ours.sendall(whole[:num_bytes])
    here.close()
    assert there.receive() is None
    there.close()
