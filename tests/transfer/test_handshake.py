"""Who may talk to whom: the handshake by itself, and against its attackers."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from tests.transfer.harness import FINGERPRINT
from tollbridge.errors import HandshakeError, ProtocolError
from tollbridge.transfer.base import Fingerprint
from tollbridge.transfer.frames import MAX_UNAUTHENTICATED_BYTES, VERSION, Kind
from tollbridge.transfer.handshake import (
    AcceptHandshake,
    DialHandshake,
    Handshake,
    Identity,
    Message,
    PeerRefusedError,
    require_same,
    short_incarnation,
)
from tollbridge.transfer.messages import (
    Challenge,
    Hello,
    Proof,
    Ready,
    Refuse,
    Welcome,
    decode_body,
    encode_body,
    encode_fingerprint,
)

SECRET = b"the cluster secret"


def identity(secret: bytes = SECRET, fingerprint: Fingerprint = FINGERPRINT) -> Identity:
    return Identity(fingerprint=fingerprint, secret=secret)


def run(dial: Handshake, accept: Handshake) -> list[Message]:
    """Let the two talk until nobody has anything to say; return all messages."""
    said = [*dial.start(), *accept.start()]
    pending = [(accept, message) for message in said]
    while pending:
        target, message = pending.pop(0)
        other = dial if target is accept else accept
        answers = target.receive(*message)
        said += answers
        pending += [(other, answer) for answer in answers]
    return said


@pytest.mark.parametrize("secret", [SECRET, b""])
def test_success(secret: bytes) -> None:
    mine, theirs = identity(secret), identity(secret)
    dial, accept = DialHandshake(mine), AcceptHandshake(theirs)
    said = run(dial, accept)
    assert [kind for kind, _ in said] == [Kind.HELLO, Kind.CHALLENGE, Kind.PROOF, Kind.WELCOME, Kind.READY]
    assert all(len(body) <= MAX_UNAUTHENTICATED_BYTES for _, body in said)
    assert dial.done and accept.done
    assert (dial.peer_incarnation, accept.peer_incarnation) == (theirs.incarnation, mine.incarnation)
    assert short_incarnation(dial.peer_incarnation) == theirs.short
    assert mine.incarnation != theirs.incarnation


def test_the_secret_is_in_no_message_and_in_no_repr() -> None:
    mine = identity()
    said = run(DialHandshake(mine), AcceptHandshake(identity()))
    assert all(SECRET not in body for _, body in said)
    assert "cluster secret" not in repr(mine)


@pytest.mark.parametrize(("mine", "theirs"), [(SECRET, b"other"), (b"", SECRET), (SECRET, b"")])
def test_wrong_secret(mine: bytes, theirs: bytes) -> None:
    dial, accept = DialHandshake(identity(mine)), AcceptHandshake(identity(theirs))
    with pytest.raises(HandshakeError, match="does not know this cluster's secret"):
        run(dial, accept)
    assert not dial.done and not accept.done and not accept.authenticated


def test_the_listener_says_nothing_about_itself_before_the_proof() -> None:
    dial, accept = DialHandshake(identity(b"wrong")), AcceptHandshake(identity())
    accept.start()
    ((_, challenge),) = accept.receive(*dial.start()[0])
    assert FINGERPRINT.layout.encode() not in challenge
    with pytest.raises(HandshakeError) as caught:
        accept.receive(*dial.receive(Kind.CHALLENGE, challenge)[0])
    assert FINGERPRINT.layout not in caught.value.message


def test_the_dialler_notices_a_listener_without_the_secret() -> None:
    dial = DialHandshake(identity())
    dial.start()
    dial.receive(Kind.CHALLENGE, encode_body(Challenge(version=VERSION, incarnation=b"i" * 16, nonce=b"n" * 32)))
    with pytest.raises(HandshakeError, match="does not know this cluster's secret"):
        dial.receive(Kind.WELCOME, encode_body(Welcome(mac=bytes(32), fingerprint=encode_fingerprint(FINGERPRINT))))
    assert not dial.authenticated


@pytest.mark.parametrize(
    ("name", "value"),
    [("model", "n"), ("dtype", "bfloat16"), ("num_layers", 4), ("tp_rank", 1), ("isa", "avx512"), ("layout", "x")],
)
def test_fingerprint_mismatch_names_field_and_values(name: str, value: object) -> None:
    other = msgspec.structs.replace(FINGERPRINT, **{name: value})
    with pytest.raises(HandshakeError) as caught:
        run(DialHandshake(identity(fingerprint=other)), AcceptHandshake(identity()))
    message = caught.value.message
    assert f"{name} is {value!r} here and {getattr(FINGERPRINT, name)!r} there" in message


def test_block_size_matters_unless_both_are_token_major() -> None:
    other = msgspec.structs.replace(FINGERPRINT, block_size=32)
    require_same(FINGERPRINT, other)
    mine = msgspec.structs.replace(FINGERPRINT, layout="head-major:k,v")
    theirs = msgspec.structs.replace(other, layout="head-major:k,v")
    with pytest.raises(HandshakeError, match="block_size is 16 here and 32 there"):
        require_same(mine, theirs)


@pytest.mark.parametrize("first", [DialHandshake, AcceptHandshake])
def test_versions_must_agree(first: type[Handshake]) -> None:
    hand = first(identity())
    hand.start()
    body = (Hello if first is AcceptHandshake else Challenge)(
        version=VERSION + 1, incarnation=b"i" * 16, nonce=b"n" * 32
    )
    with pytest.raises(HandshakeError, match=rf"version {VERSION + 1} .* version {VERSION}"):
        hand.receive(Kind.HELLO if first is AcceptHandshake else Kind.CHALLENGE, encode_body(body))


def test_a_replayed_conversation_fails() -> None:
    mine = identity()
    said = run(DialHandshake(mine), AcceptHandshake(identity()))
    accept = AcceptHandshake(identity())
    accept.start()
    accept.receive(*said[0])
    with pytest.raises(HandshakeError, match="secret"):
        accept.receive(*said[2])


def test_a_reflected_hello_fails() -> None:
    mine = identity()
    dial = DialHandshake(mine)
    ((_, hello),) = dial.start()
    body = decode_body(Kind.HELLO, hello)
    assert isinstance(body, Hello)
    reflected = Challenge(version=VERSION, incarnation=b"other incarnatio", nonce=body.nonce)
    with pytest.raises(HandshakeError, match="reflected"):
        dial.receive(Kind.CHALLENGE, encode_body(reflected))
    accept = AcceptHandshake(mine)
    accept.start()
    with pytest.raises(HandshakeError, match="reflected"):
        accept.receive(Kind.HELLO, hello)


def test_a_reflected_proof_is_no_welcome() -> None:
    dial, accept = DialHandshake(identity()), AcceptHandshake(identity())
    accept.start()
    (challenge,) = accept.receive(*dial.start()[0])
    ((_, proof_data),) = dial.receive(*challenge)
    proof = decode_body(Kind.PROOF, proof_data)
    assert isinstance(proof, Proof)
    with pytest.raises(HandshakeError, match="secret"):
        dial.receive(Kind.WELCOME, encode_body(Welcome(mac=proof.mac, fingerprint=encode_fingerprint(FINGERPRINT))))


def test_a_tampered_message_fails() -> None:
    """Someone in the path changes any message in any single byte: one of the two notices before both are done."""
    honest = run(DialHandshake(identity()), AcceptHandshake(identity()))
    for index, (_, body) in enumerate(honest):
        for position in range(len(body)):
            dial, accept = DialHandshake(identity()), AcceptHandshake(identity())
            with pytest.raises((HandshakeError, ProtocolError)):
                run_tampered(dial, accept, index, position)
            assert not (dial.done and accept.done)


def run_tampered(dial: Handshake, accept: Handshake, index: int, position: int) -> None:
    pending = dial.start()
    accept.start()
    targets = itertools.cycle([accept, dial])
    for count in range(5):
        kind, body = pending[0]
        if count == index:
            spoiled = bytearray(body)
            spoiled[position % len(spoiled)] ^= 0x01
            body = bytes(spoiled)
        pending = next(targets).receive(kind, body)


def test_out_of_turn_and_refusals() -> None:
    accept = AcceptHandshake(identity())
    accept.start()
    ready = Ready(mac=bytes(32), fingerprint=encode_fingerprint(FINGERPRINT))
    with pytest.raises(ProtocolError, match="READY out of turn"):
        accept.receive(Kind.READY, encode_body(ready))
    with pytest.raises(PeerRefusedError, match="refused the connection: go away"):
        accept.receive(Kind.REFUSE, encode_body(Refuse(detail="go\naway")))
