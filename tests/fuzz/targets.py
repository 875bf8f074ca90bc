"""What is fuzzed: everything that reads a peer's bytes. A target takes bytes, and raises when a promise is broken.

Checksums stop a fuzzer that only flips bytes at the front door, so the targets read a program from the input: which
frames to send with which fields (their checksums are made to fit), what to damage, and in which pieces it arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace

from xxhash import xxh3_64_intdigest

from tests.transfer.harness import DIGEST, FINGERPRINT, Cache
from tollbridge.clock import ManualClock
from tollbridge.errors import ProtocolError, TransferError
from tollbridge.transfer.base import LoadRequest
from tollbridge.transfer.frames import (
    HEADER_BYTES,
    MAX_CONTROL_BYTES,
    MAX_UNAUTHENTICATED_BYTES,
    Header,
    Kind,
    encode_header,
    parse_header,
)
from tollbridge.transfer.handshake import AcceptHandshake, DialHandshake, Identity
from tollbridge.transfer.loopback import LoopbackNetwork
from tollbridge.transfer.messages import Result, State, decode_body, decode_fingerprint, encode_body, encode_fingerprint
from tollbridge.transfer.reader import ConnectionClosedError, FrameReader
from tollbridge.transfer.stage import NOWHERE

KINDS = tuple(Kind)
_MAX_OPS = 64


class Program:
    """Values read from the input, front to back; zeros when it is used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def over(self) -> bool:
        return self._at >= len(self._data)

    def number(self, num_bytes: int = 1) -> int:
        return int.from_bytes(self.bytes(num_bytes), "little")

    def bytes(self, count: int) -> bytes:
        part = self._data[self._at : self._at + count]
        self._at += count
        return part.ljust(count, b"\0")

    def some(self) -> bytes:
        """Return up to 255 bytes, their number first."""
        return self.bytes(self.number())


class _Wire:
    """A channel that hands out `data` in the pieces that the program wants."""

    def __init__(self, data: bytes, program: Program) -> None:
        self._left = memoryview(data)
        self._program = program

    def recv_into(self, buffer: memoryview) -> int:
        return self.recvmsg_into([buffer])

    def recvmsg_into(self, buffers: list[memoryview]) -> int:
        limit = self._program.number() or 4096
        total = 0
        for buffer in buffers:
            piece = self._left[: min(len(buffer), limit - total)]
            buffer[: len(piece)] = piece
            self._left = self._left[len(piece) :]
            total += len(piece)
        return total


class _Sink:
    """Lands payloads between guard bytes, and writes down what it gets."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, bytes]] = []
        self._memory = bytearray()
        self._landing: SimpleNamespace | None = None

    def control(self, header: Header, body: bytearray) -> None:
        assert len(body) == header.payload_bytes <= MAX_CONTROL_BYTES
        self.frames.append((header.kind, bytes(body)))

    def begin_data(self, header: Header) -> object:
        if header.epoch % 4 == 0:
            return NOWHERE
        self._memory = bytearray(b"\xaa" * (header.payload_bytes + 16))
        inside = memoryview(self._memory)[8:-8]
        cut = header.incarnation % header.payload_bytes
        views = [view for view in (inside[:cut], inside[cut:]) if len(view)]
        self._landing = SimpleNamespace(buffers=views, batch_bytes=256 * 1024, commit=lambda: None, close=lambda: None)
        return self._landing

    def data_moved(self, header: Header) -> None:
        assert self._memory[:8] == self._memory[-8:] == b"\xaa" * 8, "a payload was written outside of its landing"

    def end_data(self, header: Header, checksum: int, landing: object) -> None:
        payload = bytes(self._memory[8:-8])
        assert landing is self._landing and len(payload) == header.payload_bytes
        assert checksum == xxh3_64_intdigest(payload)
        self.frames.append((header.kind, payload))


def frames(data: bytes) -> None:
    """A FrameReader takes any bytes in any pieces: the same frames come out, then ProtocolError or the end."""
    program = Program(data)
    authenticated = bool(program.number() % 2)
    stream = bytearray()
    for _ in range(_MAX_OPS):
        if program.over:
            break
        stream += _maybe_damaged(program, _frame(program))
    pieces = _read(bytes(stream), program, authenticated)
    whole = _read(bytes(stream), Program(b""), authenticated)
    assert pieces == whole, "the pieces in which bytes arrive changed what they mean"
    for _, body in whole[0]:
        assert authenticated or len(body) <= MAX_UNAUTHENTICATED_BYTES


def header(data: bytes) -> None:
    """A header that parses is the one that encodes to these bytes, and its sizes are within the limits."""
    for authenticated in (False, True):
        try:
            parsed = parse_header(data[:HEADER_BYTES], authenticated=authenticated)
        except ProtocolError:
            continue
        assert encode_header(parsed) == data[:HEADER_BYTES]
        assert authenticated or (parsed.kind != Kind.DATA and parsed.payload_bytes <= MAX_UNAUTHENTICATED_BYTES)


def messages(data: bytes) -> None:
    """A body is decoded, or refused with ProtocolError; encoding it again does not change its meaning."""
    program = Program(data)
    kind = KINDS[program.number() % len(KINDS)]
    body = data[1:]
    if kind != Kind.DATA:
        try:
            decoded = decode_body(kind, body)
        except ProtocolError:
            decoded = None
        if decoded is not None:
            assert decode_body(kind, encode_body(decoded)) == decoded
    try:
        fingerprint = decode_fingerprint(body)
    except ProtocolError:
        return
    assert decode_fingerprint(encode_fingerprint(fingerprint)) == fingerprint


def handshake(data: bytes) -> None:
    """Whoever does not say exactly what a peer with the secret says is refused with a TransferError."""
    program = Program(data)
    dial = DialHandshake(_identity(1), _Random(program.number()).bytes)
    accept = AcceptHandshake(_identity(2), _Random(1000 + program.number()).bytes)
    to_accept, to_dial = dial.start(), accept.start()
    honest = True
    for _ in range(8):
        for side, inbox, outbox in ((accept, to_accept, to_dial), (dial, to_dial, to_accept)):
            said, inbox[:] = list(inbox), []
            for kind, body in said:
                kind_, body_ = _spoil(program, kind, body)
                honest &= (kind_, body_) == (kind, body)
                try:
                    outbox += side.receive(kind_, body_)
                except TransferError:
                    assert not honest, "an honest peer was refused"
                    assert not side.done
                    return
                assert honest or not (side.done and side is accept), "a changed handshake was accepted"
    assert not honest or (dial.done and accept.done)


def books(data: bytes) -> None:
    """A peer that knows the secret may say anything: the books keep their invariants, or raise ProtocolError."""
    program = Program(data)
    clock = ManualClock()
    network = LoopbackNetwork(clock=clock)
    cache = Cache(16, 4, seed=0)
    sender, receiver = network.sender(cache.memory, FINGERPRINT), network.receiver(cache.memory, FINGERPRINT)
    names = [f"{index:032x}" for index in range(3)]
    for _ in range(_MAX_OPS):
        if program.over:
            break
        name, choice = names[program.number() % 3], program.number() % 8
        with suppress(TransferError):
            _act(program, choice, name, sender, receiver, clock)
        sender.check()
        receiver.check()
    for side in (receiver, sender):
        side.close()
        assert side.statistics().active == 0


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (frames, header, messages, handshake, books)
}


# ── inside ──


def _read(stream: bytes, program: Program, authenticated: bool) -> tuple[list[tuple[int, bytes]], str]:
    """Return the frames that a reader delivers, and why it stopped."""
    sink = _Sink()
    reader = FrameReader(sink, lambda: authenticated)  # type: ignore[arg-type]
    try:
        reader.read(_Wire(stream, program), 1 << 30)  # type: ignore[arg-type]
    except (ProtocolError, ConnectionClosedError) as error:
        return sink.frames, str(error)
    raise AssertionError("a stream that ended was not noticed")


def _maybe_damaged(program: Program, frame: bytes) -> bytes:
    choice = program.number()
    if choice < 250:
        return frame
    if choice == 255:
        return frame[: program.number(2)]
    spoiled = bytearray(frame)
    spoiled[program.number(2) % len(frame)] ^= program.number() or 1
    return bytes(spoiled)


def _frame(program: Program) -> bytes:
    """Return a frame with the fields that the program names, and checksums that fit."""
    kind = KINDS[program.number() % len(KINDS)]
    body = program.some()
    claimed = len(body) if program.number() < 240 else program.number(4)
    data = kind == Kind.DATA or program.number() > 250
    fields = tuple(program.number() for _ in range(4)) if data else (0, 0, 0, 0)
    checksum = xxh3_64_intdigest(body) if program.number() < 240 else program.number(8)
    names = (program.bytes(16), program.number(4), program.number(4))
    return encode_header(Header(kind, 0, *names, *fields, claimed, checksum)) + body


def _spoil(program: Program, kind: int, body: bytes) -> tuple[int, bytes]:
    choice = program.number()
    if choice < 192 or not body:
        return kind, body
    if choice < 224:
        spoiled = bytearray(body)
        spoiled[program.number(2) % len(body)] ^= program.number() or 1
        return kind, bytes(spoiled)
    return KINDS[1 + program.number() % (len(KINDS) - 1)], program.some() if choice < 248 else body


def _act(program: Program, choice: int, name: str, sender, receiver, clock: ManualClock) -> None:  # type: ignore[no-untyped-def]
    """Let an engine or a peer do something."""
    key = bytes.fromhex(name)
    if choice == 0:
        sender.register(name, digest=DIGEST, num_tokens=1 + program.number() % 16)
    elif choice == 1:
        num_tokens = program.number() % 17
        sender.publish(name, range(8), num_tokens, layer=(None, 0, 1, 2)[program.number() % 4])
    elif choice == 2:
        first = program.number() % 16
        host, port = sender.address
        load = LoadRequest(
            transfer_id=name,
            host=host,
            port=port,
            digest=DIGEST,
            first_token=first,
            num_tokens=program.number() % (17 - first),
            block_table=tuple(range(8, 16)),
        )
        receiver.open(load)
    elif choice == 3:
        clock.advance(program.number() / 8)
        sender.poll()
        receiver.poll()
    elif choice == 4:
        (sender, receiver)[program.number() % 2].cancel(name, "left")
    elif choice == 5:
        sender.shed([name], program.number() % 4, unsent_too=bool(program.number() % 2))
    else:
        side = (sender, receiver)[choice - 6]
        kind = KINDS[1 + program.number() % (len(KINDS) - 1)]
        usual = (State(state="queued", published_tokens=0), Result(outcome="done"))[choice - 6]
        body = program.some() or encode_body(usual)
        head = Header(kind, 0, key, 0, program.number() % 8, 0, 0, 0, 0, len(body), xxh3_64_intdigest(body))
        side.book.control(1 + program.number() % 2, head, body)


def _identity(number: int) -> Identity:
    return Identity(fingerprint=FINGERPRINT, secret=b"secret", incarnation=bytes([number]) * 16)


class _Random:
    """Random bytes that a seed reproduces."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def bytes(self, count: int) -> bytes:
        self._seed += 1
        return xxh3_64_intdigest(self._seed.to_bytes(8, "little")).to_bytes(8, "little").ljust(count, b"\1")[:count]
