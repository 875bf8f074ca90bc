"""Ask a KV listener who it is: the dialling side's handshake as far as WELCOME, then goodbye. For the doctor.

It goes through the real thing (handshake.py): when it succeeds, the port is reachable and speaks this protocol, both
know one secret, and TLS fits; what comes back is what the listener says of its own KV bytes.
"""

from __future__ import annotations

import socket
import time
from typing import NamedTuple

from tollbridge.errors import HandshakeError, ProtocolError
from tollbridge.transfer.base import Fingerprint
from tollbridge.transfer.channel import Channel, Tls, make_channel
from tollbridge.transfer.frames import HEADER_BYTES, NO_TRANSFER, check_body, encode_control, parse_header
from tollbridge.transfer.handshake import DialHandshake, Identity, Message
from tollbridge.transfer.messages import decode_fingerprint

_NOBODY = Fingerprint(model="", dtype="", num_layers=0, num_kv_heads=0, head_size=0, block_size=0, layout="")


class Answer(NamedTuple):
    """What the listener said, and how long the TCP connect took."""

    fingerprint: Fingerprint
    connect_s: float


def interview(host: str, port: int, secret: bytes, *, tls: Tls | None = None, timeout_s: float = 5.0) -> Answer:
    """Return what the KV listener at `host`:`port` says of itself.

    Raises OSError when nobody can be reached, HandshakeError when it does not accept us (another secret, TLS on one
    side only), ProtocolError when it speaks something else.
    """
    started_s = time.perf_counter()
    channel = make_channel(socket.create_connection((host, port), timeout=timeout_s), tls, accepting=False)
    connect_s = time.perf_counter() - started_s
    try:
        channel.start()
        return Answer(_ask(channel, secret), connect_s)
    finally:
        channel.sock.close()


def _ask(channel: Channel, secret: bytes) -> Fingerprint:
    identity = Identity(fingerprint=_NOBODY, secret=secret)
    handshake = _Interview(identity)
    handshake.bind(channel.binding)
    _send(channel, handshake.start(), identity.short)
    while True:
        answers = _receive(channel, handshake)
        if handshake.learnt is not None:
            return handshake.learnt  # `answers` is READY, which would make us a peer
        _send(channel, answers, identity.short)


class _Interview(DialHandshake):
    """Learns the listener's fingerprint instead of comparing it with one of its own."""

    learnt: Fingerprint | None = None

    def _compare(self, fingerprint: bytes) -> None:
        self.learnt = decode_fingerprint(fingerprint)

    def _maybe_ring(self, theirs: tuple[str, ...]) -> None:
        """Choose no medium: there will be no transfer."""


def _receive(channel: Channel, handshake: _Interview) -> list[Message]:
    header = parse_header(_exactly(channel, HEADER_BYTES), authenticated=handshake.authenticated)
    body = _exactly(channel, header.payload_bytes)
    check_body(header, body)
    return handshake.receive(header.kind, bytes(body))


def _send(channel: Channel, messages: list[Message], incarnation: int) -> None:
    for kind, body in messages:
        left = memoryview(encode_control(kind, NO_TRANSFER, incarnation, 0, body))
        while left:
            left = left[channel.sendmsg([left]) :]


def _exactly(channel: Channel, num_bytes: int) -> bytearray:
    buffer = bytearray(num_bytes)
    left = memoryview(buffer)
    while left:
        received = channel.recv_into(left)
        if received == 0:
            raise _hung_up(len(left) == HEADER_BYTES)
        left = left[received:]
    return buffer


def _hung_up(silent: bool) -> HandshakeError | ProtocolError:
    if silent:
        return HandshakeError("The peer closed the connection without a word: it may want TLS, or be no KV port.")
    return ProtocolError("The peer closed the connection in the middle of a message.")
