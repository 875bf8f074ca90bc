"""The wire format, pure: bytes in, values out, no sockets and no clock.

Every frame is a 64-byte header and a payload, which lies elsewhere for DATA when the handshake agreed on a ring
(placed.py). A DATA frame carries the KV of tokens [first_token, first_token + num_tokens) of a run of layers, one layer
behind the other; every other kind carries a small msgpack body (see messages.py).

    offset  size  field
         0     4  magic "TBKV"
         4     1  version           2
         5     1  kind              see Kind
         6     1  flags             0, refused otherwise
         7     1  codec             see Codec; as the handshake agreed
         8    16  transfer id       zero when the frame belongs to the connection
        24     4  incarnation       of the process that sends the frame (first 4 bytes of its incarnation id)
        28     4  epoch             which OPEN of this transfer the frame answers, chosen by decode
        32     2  layer             the first; DATA only, else 0
        34     2  num_layers        DATA only, else 0
        36     4  first_token       DATA only, else 0
        40     4  num_tokens        DATA only, else 0
        44     4  payload_bytes
        48     8  payload checksum  xxh3_64 of the payload
        56     8  header checksum   xxh3_64 of bytes 0..55

Integers are little-endian. Ranges are in tokens, not blocks: the two sides may use different block sizes, and a
partly filled last block ships exactly the tokens that it holds. The checksums find accidents (bad memory, a broken
NIC offload, a bug), not attackers: those are the business of the handshake and of TLS.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from tollbridge.errors import ProtocolError, TransferError

MAGIC = b"TBKV"
VERSION = 2
HEADER_BYTES = 64
MAX_CONTROL_BYTES = 64 * 1024
MAX_UNAUTHENTICATED_BYTES = 4 * 1024  # of a control body before the peer has proven that it knows the secret
MAX_PAYLOAD_BYTES = 64 * 1024 * 1024
NO_TRANSFER = bytes(16)

_FIELDS = struct.Struct("<4sBBBB16sIIHHIIIQ")
_CHECKSUM = struct.Struct("<Q")
assert _FIELDS.size + _CHECKSUM.size == HEADER_BYTES


class Kind(IntEnum):
    """What a frame is for."""

    DATA = 1
    # handshake, in this order
    HELLO = 2
    CHALLENGE = 3
    PROOF = 4
    WELCOME = 5
    READY = 6
    REFUSE = 7  # either side: the connection ends, and the body says why
    # transfers
    OPEN = 8  # decode -> prefill
    STATE = 9  # prefill -> decode
    CANCEL = 10  # either side: whoever drives it lost interest
    RESULT = 11  # decode -> prefill: accepted or not
    FAIL = 12  # prefill -> decode
    PING = 13  # decode -> prefill: decode is alive
    # rings, placed.py
    TAKEN = 14  # prefill -> decode: end of the handshake when READY offered a ring
    CREDIT = 15  # decode -> prefill: slots were given back


class Codec(IntEnum):
    """How the payload encodes KV bytes."""

    NONE = 0
    FP8 = 1


HANDSHAKE_KINDS = frozenset({Kind.HELLO, Kind.CHALLENGE, Kind.PROOF, Kind.WELCOME, Kind.READY, Kind.REFUSE, Kind.TAKEN})
_KINDS = frozenset(int(kind) for kind in Kind)
_CODECS = frozenset(int(codec) for codec in Codec)


class Header(NamedTuple):
    """One parsed header; `kind` and `codec` hold values of Kind and Codec."""

    kind: int
    codec: int
    transfer: bytes  # 16 bytes
    incarnation: int
    epoch: int
    layer: int
    num_layers: int
    first_token: int
    num_tokens: int
    payload_bytes: int
    payload_checksum: int

    @property
    def transfer_id(self) -> str:
        return self.transfer.hex()


def transfer_key(transfer_id: str) -> bytes:
    """Return the 16 bytes that name `transfer_id` on the wire; TransferError unless it is 32 lower-case hex digits."""
    if len(transfer_id) != 32 or not all(digit in "0123456789abcdef" for digit in transfer_id):
        raise TransferError(f"Transfer id {transfer_id[:64]!r} must be 32 hex digits (128 random bits).")
    return bytes.fromhex(transfer_id)


def encode_header(header: Header) -> bytes:
    """Return the 64 bytes of `header`, both checksums included."""
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        header.kind,
        0,
        header.codec,
        header.transfer,
        header.incarnation,
        header.epoch,
        header.layer,
        header.num_layers,
        header.first_token,
        header.num_tokens,
        header.payload_bytes,
        header.payload_checksum,
    )
    return fields + _CHECKSUM.pack(xxh3_64_intdigest(fields))


def encode_control(kind: Kind, transfer: bytes, incarnation: int, epoch: int, body: bytes) -> bytes:
    """Return a whole control frame."""
    if len(body) > MAX_CONTROL_BYTES:
        raise ProtocolError(f"A {kind.name} body of {len(body)} bytes exceeds the limit of {MAX_CONTROL_BYTES}.")
    checksum = xxh3_64_intdigest(body)
    return encode_header(Header(kind, 0, transfer, incarnation, epoch, 0, 0, 0, 0, len(body), checksum)) + body


def parse_header(data: bytes | bytearray | memoryview, *, authenticated: bool = True) -> Header:
    """Return the header in the 64 bytes `data`.

    Before the peer is authenticated only handshake kinds with a body of at most 4 KiB pass. Raises ProtocolError on
    anything that the format does not allow, so that no later code sees an impossible size.
    """
    if len(data) != HEADER_BYTES:
        raise ProtocolError(f"A frame header has {HEADER_BYTES} bytes, not {len(data)}.")
    magic, version, kind, flags, codec, *rest = _FIELDS.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError("The peer does not speak the KV protocol: its frame does not start with TBKV.")
    if version != VERSION:
        raise ProtocolError(f"The peer speaks version {version} of the KV protocol, this process version {VERSION}.")
    (checksum,) = _CHECKSUM.unpack_from(data, _FIELDS.size)
    if checksum != xxh3_64_intdigest(data[: _FIELDS.size]):
        raise ProtocolError("A frame header arrived damaged: its checksum does not fit.")
    if kind not in _KINDS or flags or codec not in _CODECS:
        raise ProtocolError(f"A frame has an unknown kind, flag or codec: {kind}, {flags}, {codec}.")
    header = Header(kind, codec, *rest)
    _check_sizes(header, authenticated=authenticated)
    return header


def check_body(header: Header, body: bytes | bytearray | memoryview) -> None:
    """Raise ProtocolError unless the control `body` is the one that `header` announced."""
    if len(body) != header.payload_bytes or xxh3_64_intdigest(body) != header.payload_checksum:
        raise ProtocolError(f"The body of a {Kind(header.kind).name} frame arrived damaged.")


def _check_sizes(header: Header, *, authenticated: bool) -> None:
    if not authenticated and header.kind not in HANDSHAKE_KINDS:
        raise ProtocolError(f"The peer sent {Kind(header.kind).name} before the handshake was over.")
    if header.kind == Kind.DATA:
        if not 0 < header.payload_bytes <= MAX_PAYLOAD_BYTES or not header.num_tokens or not header.num_layers:
            what = f"{header.num_tokens} tokens of {header.num_layers} layers"
            raise ProtocolError(f"A DATA frame has {what} in {header.payload_bytes} bytes.")
        return
    limit = MAX_CONTROL_BYTES if authenticated else MAX_UNAUTHENTICATED_BYTES
    if header.payload_bytes > limit:
        raise ProtocolError(f"A control body of {header.payload_bytes} bytes exceeds the limit of {limit}.")
    if header.layer or header.num_layers or header.first_token or header.num_tokens or header.codec:
        raise ProtocolError(f"A {Kind(header.kind).name} frame has DATA fields.")
