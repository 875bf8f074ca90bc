"""What fuzzing starts from: one well-formed input of each kind, so that it need not guess msgpack and checksums."""

from __future__ import annotations

from collections.abc import Iterator

from tests.fuzz.targets import KINDS
from tests.transfer.harness import DIGEST, FINGERPRINT
from tollbridge.transfer.frames import VERSION, Header, Kind, encode_header
from tollbridge.transfer.messages import (
    KINDS as KIND_OF,
)
from tollbridge.transfer.messages import (
    Body,
    Cancel,
    Challenge,
    Fail,
    Hello,
    Open,
    Ping,
    Proof,
    Ready,
    Refuse,
    Result,
    State,
    Welcome,
    encode_body,
    encode_fingerprint,
)

_PRINT = encode_fingerprint(FINGERPRINT)
BODIES: tuple[Body, ...] = (
    Hello(version=VERSION, incarnation=b"i" * 16, nonce=b"n" * 32, pair=b"p" * 16, lane=0),
    Challenge(version=VERSION, incarnation=b"i" * 16, nonce=b"n" * 32),
    Proof(mac=b"m" * 32),
    Welcome(mac=b"m" * 32, fingerprint=_PRINT),
    Ready(mac=b"m" * 32, fingerprint=_PRINT),
    Refuse(detail="no"),
    Open(digest=DIGEST, first_token=3, num_tokens=5),
    State(state="computing", published_tokens=7),
    Cancel(detail="left"),
    Result(outcome="failed", reason="checksum", detail="damaged"),
    Fail(reason="digest_mismatch", detail="other tokens"),
    Ping(),
)


def seeds(target: str) -> Iterator[bytes]:
    """Yield the inputs that a target starts from."""
    if target == "messages":
        yield bytes([KINDS.index(Kind.WELCOME)]) + _PRINT
        for body in BODIES:
            yield bytes([KINDS.index(KIND_OF[type(body)])]) + encode_body(body)
    elif target == "header":
        for kind in Kind:
            data = (2, 1, 4, 6) if kind == Kind.DATA else (0, 0, 0, 0)
            yield encode_header(Header(kind, 0, b"t" * 16, 1, 2, *data, 96, 3))
    elif target == "books":
        for body in BODIES:
            said = encode_body(body)
            kind = KINDS.index(KIND_OF[type(body)]) - 1
            speak = bytes([kind, len(said)]) + said + b"\1\0"
            yield b"\0\0\5" + b"\0\2\0\7" + b"\0\6" + speak + b"\0\7" + speak + b"\0\1\5\0"
    elif target == "frames":
        for kind in range(len(KINDS)):
            yield b"\1" + b"".join(bytes([kind, 4]) + b"body" + bytes(40) for _ in range(2))
    else:
        yield bytes(range(1, 30))
        yield b"\1\2" + b"\xc3\0\1" + bytes(20)
