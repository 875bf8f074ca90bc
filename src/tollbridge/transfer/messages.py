"""Bodies of the control frames: msgspec structs as msgpack, bounded, unknown fields refused."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from tollbridge.errors import ProtocolError
from tollbridge.transfer.base import Fingerprint, SendState
from tollbridge.transfer.frames import MAX_PAYLOAD_BYTES, Kind

MAX_DETAIL = 1000  # characters of a sentence from a peer

Detail: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_DETAIL)]
Code: TypeAlias = Annotated[str, msgspec.Meta(max_length=40)]
Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Bytes16: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Bytes32: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
FingerprintBytes: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=3000)]  # msgpack, as the MAC covers it
FrameBytes: TypeAlias = Annotated[int, msgspec.Meta(gt=0, le=MAX_PAYLOAD_BYTES)]
Lane: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=256)]
DigestBytes: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]


Media: TypeAlias = Annotated[tuple[Code, ...], msgspec.Meta(max_length=8)]  # names, the best first


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all bodies."""


class Hello(_Body, frozen=True, kw_only=True):
    """The dialling side introduces itself and challenges the other."""

    version: int
    incarnation: Bytes16
    nonce: Bytes32
    pair: Bytes16 = bytes(16)  # random; the connections that name the same one belong together
    lane: Lane = 0  # 0: the first connection of the pair, which carries the control frames; others carry DATA only


class Challenge(_Body, frozen=True, kw_only=True):
    """The listening side's counterpart of Hello."""

    version: int
    incarnation: Bytes16
    nonce: Bytes32


class Proof(_Body, frozen=True, kw_only=True):
    """The dialling side proves that it knows the secret; it goes first because the listener is the exposed one."""

    mac: Bytes32


class Ring(_Body, frozen=True, kw_only=True):
    """Where the payloads of a connection go instead of through it: a ring of decode's (placed.py)."""

    medium: Code
    num_slots: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    slot_bytes: FrameBytes
    name: Annotated[str, msgspec.Meta(max_length=100)] = ""  # shm: of the file
    agent: Annotated[bytes, msgspec.Meta(max_length=32 * 1024)] = b""  # nixl: metadata of decode's agent
    address: Annotated[int, msgspec.Meta(ge=0)] = 0  # nixl: of the ring


class Welcome(_Body, frozen=True, kw_only=True):
    """The listening side proves the same, says what its KV bytes mean, and which media it has."""

    mac: Bytes32
    fingerprint: FingerprintBytes
    media: Media = ("tcp",)


class Ready(_Body, frozen=True, kw_only=True):
    """The dialling side says what its KV bytes mean, which media it has, and offers a ring if one of them fits."""

    mac: Bytes32
    fingerprint: FingerprintBytes
    media: Media = ("tcp",)
    ring: Ring | None = None


class Taken(_Body, frozen=True, kw_only=True):
    """Prefill's answer to a ring: the medium of this connection, and why when it is not the ring's."""

    medium: Code
    detail: Detail = ""


class Credit(_Body, frozen=True, kw_only=True):
    """Decode gave back so many slots of the ring since the beginning."""

    total: Annotated[int, msgspec.Meta(ge=0)]


class Refuse(_Body, frozen=True, kw_only=True):
    """Why the connection ends."""

    detail: Detail


class Open(_Body, frozen=True, kw_only=True):
    """Decode asks for tokens [first_token, first_token + num_tokens) of every layer."""

    digest: DigestBytes
    first_token: Tokens
    num_tokens: Tokens
    max_payload_bytes: FrameBytes = MAX_PAYLOAD_BYTES  # decode has no room for a larger frame


class State(_Body, frozen=True, kw_only=True):
    """Prefill says where the transfer stands; repeated as a heartbeat."""

    state: SendState
    published_tokens: Tokens  # in every layer


class Cancel(_Body, frozen=True, kw_only=True):
    """The side that sends it ended the transfer as cancelled."""

    detail: Detail


class Result(_Body, frozen=True, kw_only=True):
    """Decode's verdict; the last message of a transfer."""

    outcome: Literal["done", "failed"]
    reason: Code = ""
    detail: Detail = ""


class Fail(_Body, frozen=True, kw_only=True):
    """Prefill cannot or will not serve the transfer."""

    reason: Code
    detail: Detail


class Ping(_Body, frozen=True, kw_only=True):
    """Decode is alive; prefill drops a connection with open transfers that stays silent."""


Body: TypeAlias = (
    Hello | Challenge | Proof | Welcome | Ready | Refuse | Open | State | Cancel | Result | Fail | Ping | Taken | Credit
)

TYPES: dict[Kind, type[Body]] = {
    Kind.HELLO: Hello,
    Kind.CHALLENGE: Challenge,
    Kind.PROOF: Proof,
    Kind.WELCOME: Welcome,
    Kind.READY: Ready,
    Kind.REFUSE: Refuse,
    Kind.OPEN: Open,
    Kind.STATE: State,
    Kind.CANCEL: Cancel,
    Kind.RESULT: Result,
    Kind.FAIL: Fail,
    Kind.PING: Ping,
    Kind.TAKEN: Taken,
    Kind.CREDIT: Credit,
}
KINDS: dict[type[Body], Kind] = {struct: kind for kind, struct in TYPES.items()}
_FINGERPRINT = msgspec.msgpack.Decoder(Fingerprint)
_DECODERS = {kind: msgspec.msgpack.Decoder(struct) for kind, struct in TYPES.items()}


def encode_body(body: Body) -> bytes:
    """Return `body` as msgpack."""
    return msgspec.msgpack.encode(body)


def decode_body(kind: int, data: bytes | bytearray | memoryview) -> Body:
    """Return the body of a control frame; ProtocolError when it is malformed."""
    try:
        return _DECODERS[Kind(kind)].decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"The body of a {Kind(kind).name} frame is malformed: {error}.") from None


def encode_fingerprint(fingerprint: Fingerprint) -> bytes:
    """Return `fingerprint` as Welcome and Ready carry it."""
    return msgspec.msgpack.encode(fingerprint)


def decode_fingerprint(data: bytes) -> Fingerprint:
    """Return the fingerprint of a peer; ProtocolError when it is malformed."""
    try:
        return _FINGERPRINT.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"The peer's fingerprint is malformed: {error}.") from None


def clip(detail: str) -> str:
    """Return `detail` as it may travel: printable and within the limit."""
    return "".join(c if c.isprintable() else " " for c in detail[:MAX_DETAIL])
