"""What two link probes say to each other: a mutual proof of the cluster secret, then short messages.

    prober                                     server
    MAGIC, nonce                          ->
                                          <-   MAGIC, nonce
    HMAC(dial, both nonces)               ->
                                          <-   HMAC(accept, both nonces)

Every connection begins so, those that carry measured bytes too. As in transfer/handshake.py a replay fails (fresh
nonces both ways) and a reflection fails (the labels differ); the server says nothing about itself before the proof. On
loopback the secret may be empty.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket

import msgspec

from tollbridge.errors import HandshakeError, ProtocolError

MAGIC = b"tollbridge-probe/1"
NONCE_BYTES = MAC_BYTES = 32
MAX_MESSAGE_BYTES = 64 * 1024
MAX_STREAMS = 64
MAX_FLOW_S = 60.0
MAX_TOKENS = 1 << 16  # of one KV transfer


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all."""


class Begin(Message, frozen=True, kw_only=True):
    """First on the connection that controls a probe."""


class Begun(Message, frozen=True, kw_only=True):
    session: bytes


class Join(Message, frozen=True, kw_only=True):
    """First on a connection that carries bytes: which flow of which probe it belongs to."""

    session: bytes
    flow: int


class Ping(Message, frozen=True, kw_only=True):
    """Answered by Done at once."""


class Done(Message, frozen=True, kw_only=True):
    """It was done."""


class Refused(Message, frozen=True, kw_only=True):
    detail: str


class Flow(Message, frozen=True, kw_only=True):
    """Send (or receive) over the next `streams` connections that join `flow`, for `seconds`."""

    flow: int
    streams: int
    sends: bool
    seconds: float


class Ask(Message, frozen=True, kw_only=True):
    """What arrived over a flow that you received? Waits for its end."""

    flow: int


class Rate(Message, frozen=True, kw_only=True):
    """Bytes per second over a flow's steady part, and of its slowest and fastest fifth."""

    bytes_per_s: float
    low: float
    high: float


class KvOpen(Message, frozen=True, kw_only=True):
    """Be the sender or the receiver of KV transfers, with so many streams."""

    sends: bool
    streams: int


class KvOpened(Message, frozen=True, kw_only=True):
    port: int  # of a sender


class KvOffer(Message, frozen=True, kw_only=True):
    transfer_id: str
    num_tokens: int


class KvLoad(Message, frozen=True, kw_only=True):
    """Load from the prober, whose sender listens on `port`."""

    transfer_id: str
    num_tokens: int
    port: int


class KvLoaded(Message, frozen=True, kw_only=True):
    seconds: float
    detail: str = ""  # why not, when it did not arrive


class KvClose(Message, frozen=True, kw_only=True):
    """End the side that KvOpen began."""


AnyMessage = (
    Begin
    | Begun
    | Join
    | Ping
    | Done
    | Refused
    | Flow
    | Ask
    | Rate
    | KvOpen
    | KvOpened
    | KvOffer
    | KvLoad
    | KvLoaded
    | KvClose
)
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def dial_proof(sock: socket.socket, secret: bytes) -> None:
    """Prove the secret to a server and have it proven; HandshakeError says which of both failed."""
    mine = secrets.token_bytes(NONCE_BYTES)
    sock.sendall(MAGIC + mine)
    hello = _exactly(sock, len(MAGIC) + NONCE_BYTES)
    if not hello.startswith(MAGIC):
        raise HandshakeError("what answers there is no `tollbridge probe link serve`.")
    both = mine + hello[len(MAGIC) :]
    sock.sendall(_mac(secret, b"dial", both))
    try:
        theirs = _exactly(sock, MAC_BYTES)
    except ProtocolError:
        theirs = b""
    if not hmac.compare_digest(theirs, _mac(secret, b"accept", both)):
        raise HandshakeError("the two sides do not have the same secret: set one TOLLBRIDGE_SECRET on both hosts.")


def accept_proof(sock: socket.socket, secret: bytes) -> None:
    """Let a prober prove the secret; HandshakeError when it does not know it."""
    hello = _exactly(sock, len(MAGIC) + NONCE_BYTES)
    if not hello.startswith(MAGIC):
        raise HandshakeError("it is no `tollbridge probe link`.")
    mine = secrets.token_bytes(NONCE_BYTES)
    sock.sendall(MAGIC + mine)
    both = hello[len(MAGIC) :] + mine
    if not hmac.compare_digest(_exactly(sock, MAC_BYTES), _mac(secret, b"dial", both)):
        raise HandshakeError("it does not know this cluster's secret.")
    sock.sendall(_mac(secret, b"accept", both))


def say(sock: socket.socket, message: AnyMessage) -> None:
    data = msgspec.msgpack.encode(message)
    sock.sendall(len(data).to_bytes(4, "big") + data)


def hear(sock: socket.socket) -> AnyMessage:
    """Return the next message; ProtocolError when the peer left or sent something else."""
    size = int.from_bytes(_exactly(sock, 4), "big")
    if size > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"The peer announced a message of {size} bytes.")
    try:
        return _decoder.decode(_exactly(sock, size))
    except msgspec.DecodeError:
        raise ProtocolError(
            "The peer sent a message that this version does not know: run one release on both."
        ) from None


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise ProtocolError("The peer ended the connection.")
        data += piece
    return bytes(data)


def _mac(secret: bytes, label: bytes, nonces: bytes) -> bytes:
    return hmac.new(secret, MAGIC + b"\0" + label + b"\0" + nonces, hashlib.sha256).digest()
