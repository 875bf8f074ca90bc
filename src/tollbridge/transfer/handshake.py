"""Who may exchange KV with whom: a mutual challenge-response over the cluster secret, without I/O.

    decode (dials)                                        prefill (listens)
    HELLO     version, incarnation, nonce        ->
                                                 <-       CHALLENGE  version, incarnation, nonce
    PROOF     HMAC(dial, transcript)             ->
                                                 <-       WELCOME    HMAC(accept, transcript), fingerprint, media
    READY     HMAC(ready, transcript), fingerprint, media, perhaps a ring ->
                                                 <-       TAKEN      the medium; only when READY had a ring

Every MAC is HMAC-SHA256 under the secret, over a label of its direction and all bytes exchanged so far. So a replay
fails (fresh nonces both ways), a reflection fails (labels differ, equal nonces are refused), and so does a downgrade
(the versions are in the transcript). The listener is the exposed side: it says nothing about itself, beyond a random
incarnation, before the other has proven the secret, and reads at most 4 KiB per message until then. An empty secret
(allowed on loopback only) runs through the same code with an empty key.

Lanes. Two workers may share several connections: all of a pair name the same random id and their number in HELLO, under
the MACs, and each goes through the whole handshake. The listener lets a lane join only a pair of the same incarnation,
the dialler only when the incarnation that answers is the one that its first connection met.

Media. Each side names those that the connection may use, the best first; decode takes its first that prefill has, and
refuses when there is none. Where payloads go through a ring (placed.py) it offers one, which prefill takes, or leaves
with a reason: then both fall back to TCP if both have it.

This keeps strangers and wrong clusters out. It does not protect the frames that follow from somebody in the path: that
is the business of TLS underneath, whose certificates the MACs then cover as well.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from tollbridge.errors import HandshakeError, ProtocolError, TransferError
from tollbridge.transfer.base import Fingerprint
from tollbridge.transfer.frames import VERSION, Kind
from tollbridge.transfer.messages import (
    Body,
    Challenge,
    Hello,
    Proof,
    Ready,
    Refuse,
    Ring,
    Taken,
    Welcome,
    clip,
    decode_body,
    decode_fingerprint,
    encode_body,
    encode_fingerprint,
)
from tollbridge.transfer.placed import TCP, Inlet, OnlyTcp, Outlet, Routes, choose

logger = logging.getLogger(__name__)

_MAJOR_ORDER = "token-major"
Message = tuple[Kind, bytes]
RandomBytes = Callable[[int], bytes]


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What one medium of one process brings to every handshake."""

    fingerprint: Fingerprint
    secret: bytes = field(default=b"", repr=False)
    incarnation: bytes = field(default_factory=lambda: secrets.token_bytes(16))

    @property
    def short(self) -> int:
        """The incarnation as frames carry it."""
        return short_incarnation(self.incarnation)


def short_incarnation(incarnation: bytes) -> int:
    return int.from_bytes(incarnation[:4], "little")


def require_same(local: Fingerprint, peer: Fingerprint) -> None:
    """Raise HandshakeError naming the first field that differs and both values."""
    for name in differing_fields(local, peer):
        ours, theirs = getattr(local, name), getattr(peer, name)
        raise HandshakeError(
            f"KV of the two workers is not interchangeable: {name} is {ours!r} here and {_short(theirs)} there."
        )


def differing_fields(one: Fingerprint, other: Fingerprint) -> list[str]:
    """Return the names of the fields in which KV of the two is not interchangeable.

    `block_size` may differ when both layouts are token-major: frames carry token ranges, so it does not matter then.
    """
    token_major = one.layout.startswith(_MAJOR_ORDER) and other.layout.startswith(_MAJOR_ORDER)
    return [
        name
        for name in Fingerprint.__struct_fields__
        if getattr(one, name) != getattr(other, name) and not (name == "block_size" and token_major)
    ]


def _short(value: object) -> str:
    return repr(value)[:200]


class _Transcript:
    """All bytes exchanged so far, as a running hash."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._hash = hashlib.sha256(b"tollbridge-kv/1")
        self.binding: Callable[[], bytes] = bytes  # asked when a MAC is due: a channel learns it late

    def add(self, data: bytes) -> None:
        self._hash.update(len(data).to_bytes(4, "little"))
        self._hash.update(data)

    def mac(self, label: bytes, extra: bytes = b"") -> bytes:
        """Return the MAC of the transcript, the channel and `extra` for the direction `label`."""
        said = label + b"\0" + self._hash.digest() + self.binding() + extra
        return hmac.new(self._secret, said, hashlib.sha256).digest()

    def verify(self, label: bytes, mac: bytes, extra: bytes = b"") -> None:
        if not hmac.compare_digest(mac, self.mac(label, extra)):
            raise HandshakeError("The peer does not know this cluster's secret: set one TOLLBRIDGE_SECRET everywhere.")


class Place(NamedTuple):
    """Which connection of which pair of workers this is."""

    pair: bytes  # random, chosen by the dialler
    lane: int


class Handshake(ABC):
    """What both sides share: identity, transcript, and the peer once it is known."""

    def __init__(
        self, identity: Identity, random_bytes: RandomBytes = secrets.token_bytes, *, place: Place | None = None
    ) -> None:
        self._identity = identity
        self.place = place or Place(random_bytes(16), 0)  # the listener takes over what the dialler says
        self._nonce = random_bytes(32)
        self._transcript = _Transcript(identity.secret)
        self._expected: Kind | None = None
        self.peer_incarnation = b""
        self.authenticated = False  # the peer has proven the secret: larger bodies may be read
        self.done = False
        self.medium = TCP
        self.inlet: Inlet | None = None  # decode's end of the ring that was agreed on
        self.outlet: Outlet | None = None  # prefill's
        self._routes: Routes = OnlyTcp()
        self._is_same_host: Callable[[], bool] = bool
        self._media: tuple[str, ...] = (TCP,)

    def bind(self, binding: Callable[[], bytes]) -> None:
        """Let the MACs cover what names the channel underneath (see channel.py). Before `start`."""
        self._transcript.binding = binding

    def offer(self, routes: Routes, is_same_host: Callable[[], bool]) -> None:
        """Let payloads take one of `routes`; without, they go over TCP. Before `start`."""
        self._routes, self._is_same_host = routes, is_same_host

    def close(self) -> None:
        """Let go of a ring that is not in use yet; the connection closes one that is."""
        if self.inlet is not None:
            self.inlet.close()
        if self.outlet is not None:
            self.outlet.close()

    def start(self) -> list[Message]:
        """Return what to send as soon as the connection is up."""
        return []

    def receive(self, kind: int, data: bytes) -> list[Message]:
        """Take one message and return the answers.

        Raises HandshakeError when the two must not go on, ProtocolError when the message does not belong here.
        """
        body = decode_body(kind, data)
        if isinstance(body, Refuse):
            raise PeerRefusedError(f"The peer refused the connection: {clip(body.detail)}")
        if kind != self._expected:
            raise ProtocolError(f"The peer sent {Kind(kind).name} out of turn in the handshake.")
        return self._advance(body, data)

    @abstractmethod
    def _advance(self, body: Body, data: bytes) -> list[Message]:
        """Take the message that was expected and return the answers."""

    def _say(self, body: Body, kind: Kind) -> Message:
        data = encode_body(body)
        self._transcript.add(data)
        return kind, data

    def _meet(self, body: Hello | Challenge) -> None:
        if body.version != VERSION:
            raise HandshakeError(
                f"The peer speaks version {body.version} of the KV protocol, this process version {VERSION}: "
                "run one release on all workers."
            )
        if body.nonce == self._nonce or body.incarnation == self._identity.incarnation:
            raise HandshakeError("The peer reflected this process's own handshake.")
        self.peer_incarnation = body.incarnation

    def _compare(self, fingerprint: bytes) -> None:
        require_same(self._identity.fingerprint, decode_fingerprint(fingerprint))

    def _name_media(self) -> tuple[str, ...]:
        self._media = self._routes.names(self._is_same_host)
        return self._media

    def _refuse_media(self, theirs: tuple[str, ...], why: str = "") -> HandshakeError:
        ours = " or ".join(self._media)
        detail = f" ({clip(why)})" if why else ""
        return HandshakeError(
            f"The two workers have no medium in common: transfer.media is {ours} here and "
            f"{clip(' or '.join(theirs))} there{detail}."
        )


class PeerRefusedError(HandshakeError):
    """The other side ended the handshake and said why; do not answer."""


class DialHandshake(Handshake):
    """The side that connects: decode."""

    _theirs: tuple[str, ...] = ()  # prefill's media

    def start(self) -> list[Message]:
        self._expected = Kind.CHALLENGE
        pair, lane = self.place
        incarnation = self._identity.incarnation
        hello = Hello(version=VERSION, incarnation=incarnation, nonce=self._nonce, pair=pair, lane=lane)
        return [self._say(hello, Kind.HELLO)]

    def _advance(self, body: Body, data: bytes) -> list[Message]:
        if isinstance(body, Challenge):
            return self._challenged(body, data)
        if isinstance(body, Taken):
            self._taken(body)
            return []
        assert isinstance(body, Welcome)
        self._transcript.verify(b"accept", body.mac, _claims(body.fingerprint, body.media))
        self.authenticated = True
        self._transcript.add(data)
        self._compare(body.fingerprint)
        ring = self._maybe_ring(body.media)
        self.done, self._expected = ring is None, Kind.TAKEN
        fingerprint, media = encode_fingerprint(self._identity.fingerprint), self._media
        mac = self._transcript.mac(b"ready", _claims(fingerprint, media, ring))
        return [self._say(Ready(mac=mac, fingerprint=fingerprint, media=media, ring=ring), Kind.READY)]

    def _maybe_ring(self, theirs: tuple[str, ...]) -> Ring | None:
        """Choose the medium; return the ring that it takes, and wait for the answer then."""
        self._theirs, ours = theirs, self._name_media()
        chosen = choose(ours, theirs)
        if chosen is None:
            raise self._refuse_media(theirs)
        if chosen == TCP:
            return None
        try:
            self.inlet = self._routes.inlet(chosen)
        except TransferError as error:
            if TCP not in ours or TCP not in theirs:
                raise
            logger.info("KV goes over TCP: %s", error.message)
            return None
        return self.inlet.ring()

    def _taken(self, body: Taken) -> None:
        assert self.inlet is not None
        if body.medium == self.inlet.medium:
            self.inlet.taken()
        elif body.medium == TCP and TCP in self._media:
            logger.info(
                "KV goes over TCP, prefill could not take the %s ring: %s", self.inlet.medium, clip(body.detail)
            )
            self.inlet.close()
            self.inlet = None
        else:
            raise self._refuse_media(self._theirs, body.detail)
        self.medium = body.medium
        self.done = True

    def _challenged(self, body: Challenge, data: bytes) -> list[Message]:
        self._meet(body)
        self._transcript.add(data)
        self._expected = Kind.WELCOME
        return [self._say(Proof(mac=self._transcript.mac(b"dial")), Kind.PROOF)]


class AcceptHandshake(Handshake):
    """The side that listens: prefill."""

    def start(self) -> list[Message]:
        self._expected = Kind.HELLO
        return []

    def _advance(self, body: Body, data: bytes) -> list[Message]:
        if isinstance(body, Hello):
            return self._greeted(body, data)
        if isinstance(body, Proof):
            return self._proven(body, data)
        assert isinstance(body, Ready)
        self._transcript.verify(b"ready", body.mac, _claims(body.fingerprint, body.media, body.ring))
        self._compare(body.fingerprint)
        if body.ring is None and TCP not in self._media:
            raise self._refuse_media(body.media)
        answers = [] if body.ring is None else [self._say(self._take(body.ring, body.media), Kind.TAKEN)]
        self.done = True
        return answers

    def _take(self, ring: Ring, theirs: tuple[str, ...]) -> Taken:
        """Take the ring; or TCP, when it cannot be reached and both have that."""
        try:
            if ring.medium not in self._media:
                raise HandshakeError(f"Decode offered a ring of {ring.medium}.")
            self.outlet = self._routes.outlet(ring)
        except TransferError as error:
            if TCP in self._media and TCP in theirs:
                return Taken(medium=TCP, detail=clip(error.message))
            raise self._refuse_media(theirs, error.message) from None
        self.medium = ring.medium
        return Taken(medium=ring.medium)

    def _greeted(self, body: Hello, data: bytes) -> list[Message]:
        self._meet(body)
        self.place = Place(body.pair, body.lane)
        self._transcript.add(data)
        self._expected = Kind.PROOF
        challenge = Challenge(version=VERSION, incarnation=self._identity.incarnation, nonce=self._nonce)
        return [self._say(challenge, Kind.CHALLENGE)]

    def _proven(self, body: Proof, data: bytes) -> list[Message]:
        self._transcript.verify(b"dial", body.mac)
        self.authenticated = True
        self._transcript.add(data)
        self._expected = Kind.READY
        fingerprint, media = encode_fingerprint(self._identity.fingerprint), self._name_media()
        mac = self._transcript.mac(b"accept", _claims(fingerprint, media))
        return [self._say(Welcome(mac=mac, fingerprint=fingerprint, media=media), Kind.WELCOME)]


def _claims(fingerprint: bytes, media: tuple[str, ...], ring: Ring | None = None) -> bytes:
    """Return what a MAC covers of what a side says of itself."""
    return msgspec.msgpack.encode((fingerprint, media, ring))
