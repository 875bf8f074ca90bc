"""The wire format: round trips, and nothing but ProtocolError on anything else."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from tollbridge.errors import ProtocolError, TransferError
from tollbridge.transfer.frames import (
    HANDSHAKE_KINDS,
    HEADER_BYTES,
    MAX_CONTROL_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_UNAUTHENTICATED_BYTES,
    NO_TRANSFER,
    Header,
    Kind,
    check_body,
    encode_control,
    encode_header,
    parse_header,
    transfer_key,
)
from tollbridge.transfer.messages import (
    KINDS,
    MAX_DETAIL,
    TYPES,
    Cancel,
    Open,
    Result,
    State,
    clip,
    decode_body,
    encode_body,
)

u16 = st.integers(0, 2**16 - 1)
u32 = st.integers(0, 2**32 - 1)
transfers = st.binary(min_size=16, max_size=16)
data_headers = st.builds(
    Header,
    kind=st.just(int(Kind.DATA)),
    codec=st.just(0),
    transfer=transfers,
    incarnation=u32,
    epoch=u32,
    layer=u16,
    num_layers=st.integers(1, 2**16 - 1),
    first_token=u32,
    num_tokens=st.integers(1, 2**32 - 1),
    payload_bytes=st.integers(1, MAX_PAYLOAD_BYTES),
    payload_checksum=st.integers(0, 2**64 - 1),
)
control_kinds = st.sampled_from(sorted(TYPES))


@given(data_headers)
def test_header_round_trip(header: Header) -> None:
    data = encode_header(header)
    assert len(data) == HEADER_BYTES == 64
    assert parse_header(data) == header
    assert bytes.fromhex(header.transfer_id) == header.transfer


@given(control_kinds, transfers, u32, u32, st.binary(max_size=300))
def test_control_round_trip(kind: Kind, transfer: bytes, incarnation: int, epoch: int, body: bytes) -> None:
    frame = encode_control(kind, transfer, incarnation, epoch, body)
    header = parse_header(frame[:HEADER_BYTES])
    assert (header.kind, header.transfer, header.incarnation, header.epoch) == (kind, transfer, incarnation, epoch)
    check_body(header, frame[HEADER_BYTES:])


@given(data_headers, st.integers(0, HEADER_BYTES * 8 - 1))
def test_every_flipped_bit_is_noticed(header: Header, bit: int) -> None:
    data = bytearray(encode_header(header))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        parse_header(data)


@given(st.binary(max_size=200))
def test_garbage(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_header(data)


@given(data_headers, st.integers(0, HEADER_BYTES - 1))
def test_truncation(header: Header, length: int) -> None:
    with pytest.raises(ProtocolError, match="has 64 bytes"):
        parse_header(encode_header(header)[:length])


def forged(offset: int, value: bytes) -> bytes:
    """A header with a patched field and a checksum that fits."""
    header = Header(Kind.DATA, 0, b"t" * 16, 1, 1, 0, 1, 0, 1, 10, 0)
    data = bytearray(encode_header(header))
    data[offset : offset + len(value)] = value
    data[56:64] = xxh3_64_intdigest(bytes(data[:56])).to_bytes(8, "little")
    return bytes(data)


@pytest.mark.parametrize(
    ("offset", "value", "match"),
    [
        (0, b"HTTP", "does not start with TBKV"),
        (4, b"\x03", "version 3"),
        (5, b"\x63", "unknown kind"),
        (6, b"\x01", "unknown kind, flag"),
        (7, b"\x09", "unknown kind, flag or codec"),
        (40, bytes(4), "0 tokens"),
        (34, bytes(2), "of 0 layers"),
        (44, bytes(4), "in 0 bytes"),
        (44, (MAX_PAYLOAD_BYTES + 1).to_bytes(4, "little"), "bytes"),
        (5, bytes([Kind.OPEN]), "OPEN frame has DATA fields"),
    ],
)
def test_what_the_format_forbids(offset: int, value: bytes, match: str) -> None:
    with pytest.raises(ProtocolError, match=match):
        parse_header(forged(offset, value))


def test_control_bodies_are_bounded() -> None:
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        encode_control(Kind.OPEN, NO_TRANSFER, 0, 0, bytes(MAX_CONTROL_BYTES + 1))
    head = encode_header(Header(Kind.OPEN, 0, NO_TRANSFER, 0, 0, 0, 0, 0, 0, MAX_CONTROL_BYTES + 1, 0))
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        parse_header(head)


@pytest.mark.parametrize("kind", sorted(Kind))
def test_before_authentication_only_small_handshake_frames_pass(kind: Kind) -> None:
    if kind == Kind.DATA:
        small = encode_header(Header(kind, 0, NO_TRANSFER, 0, 0, 0, 1, 0, 1, 1, 0))
    else:
        small = encode_control(kind, NO_TRANSFER, 0, 0, b"x")[:HEADER_BYTES]
    if kind not in HANDSHAKE_KINDS:
        with pytest.raises(ProtocolError, match="before the handshake was over"):
            parse_header(small, authenticated=False)
        return
    parse_header(small, authenticated=False)
    big = encode_control(kind, NO_TRANSFER, 0, 0, bytes(MAX_UNAUTHENTICATED_BYTES + 1))[:HEADER_BYTES]
    with pytest.raises(ProtocolError, match="limit of 4096"):
        parse_header(big, authenticated=False)


def test_a_damaged_body_is_noticed() -> None:
    frame = encode_control(Kind.OPEN, NO_TRANSFER, 0, 0, b"body")
    header = parse_header(frame[:HEADER_BYTES])
    for body in (b"bodY", b"bod", b"bodyy"):
        with pytest.raises(ProtocolError, match="OPEN frame arrived damaged"):
            check_body(header, body)


def test_transfer_key() -> None:
    assert transfer_key("0f" * 16) == b"\x0f" * 16
    for bad in ("", "0f" * 15, "0F" * 16, "zz" * 16, "0f" * 17):
        with pytest.raises(TransferError, match="must be 32 hex digits"):
            transfer_key(bad)


@pytest.mark.parametrize(
    "body",
    [
        Open(digest=b"d" * 16, first_token=3, num_tokens=2**32 - 1),
        State(state="computing", published_tokens=7),
        Cancel(detail="why"),
        Result(outcome="failed", reason="checksum", detail="layer 3"),
    ],
)
def test_body_round_trip(body: Open | State | Cancel | Result) -> None:
    assert decode_body(KINDS[type(body)], encode_body(body)) == body


@given(control_kinds, st.binary(max_size=100))
def test_garbage_bodies(kind: Kind, data: bytes) -> None:
    try:
        decode_body(kind, data)
    except ProtocolError as error:
        assert kind.name in error.message


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Kind.OPEN, {"digest": b"d", "first_token": -1, "num_tokens": 1}),
        (Kind.OPEN, {"digest": b"d", "first_token": 0, "num_tokens": 2**32}),
        (Kind.OPEN, {"digest": b"d" * 65, "first_token": 0, "num_tokens": 1}),
        (Kind.OPEN, {"digest": b"d", "first_token": 0, "num_tokens": 1, "extra": 1}),
        (Kind.STATE, {"state": "bored", "published_tokens": 1}),
        (Kind.CANCEL, {"detail": "x" * (MAX_DETAIL + 1)}),
        (Kind.RESULT, {"outcome": "cancelled"}),
    ],
)
def test_malformed_bodies(kind: Kind, body: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match=f"body of a {kind.name} frame is malformed"):
        decode_body(kind, msgspec.msgpack.encode(body))


def test_clip_makes_a_sentence_fit_to_travel() -> None:
    assert clip("a\nb\x00c") == "a b c"
    assert len(clip("x" * 5000)) == MAX_DETAIL
