"""One TCP connection between two workers: handshake first, then frames both ways.

Used by the I/O thread that owns it, but for what the writer and the reader allow to any thread (push, release, settle).
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Protocol

from tollbridge.clock import Clock
from tollbridge.errors import IntegrityError, ProtocolError, TransferError
from tollbridge.transfer.base import Reason
from tollbridge.transfer.channel import Channel
from tollbridge.transfer.frames import (
    HANDSHAKE_KINDS,
    MAX_PAYLOAD_BYTES,
    NO_TRANSFER,
    Header,
    Kind,
    encode_control,
)
from tollbridge.transfer.handshake import Handshake, Message, PeerRefusedError, Place, short_incarnation
from tollbridge.transfer.messages import KINDS, Credit, Refuse, clip, decode_body, encode_body
from tollbridge.transfer.net import limit_unsent
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.pacing import FrameSizer, GoodputMeter
from tollbridge.transfer.placed import Routes
from tollbridge.transfer.reader import FrameReader
from tollbridge.transfer.stage import Landing
from tollbridge.transfer.tally import Verdict
from tollbridge.transfer.writer import FrameWriter

_BUDGET_BYTES = 4 * 1024 * 1024  # per turn: other connections and the engine's requests come in between


class Side(Protocol):
    """What a connection needs from the medium that owns it. Transfers belong to pairs, known by number."""

    routes: Routes

    def connected(self, connection: Connection) -> None: ...
    def control(self, pair: int, header: Header, body: bytearray) -> None: ...
    def begin_data(self, pair: int, header: Header) -> Landing | None: ...
    def data_moved(self, pair: int, header: Header) -> None: ...
    def end_data(self, pair: int, header: Header, checksum: int, landing: Landing) -> None: ...
    def fill(self, connection: Connection, *, ahead: bool) -> None:
        """Push the frame that shall follow unless it is there; `ahead`: as many as there is room for."""
        ...

    def frame_sent(self, transfer: bytes) -> None: ...


class Connection:
    """See the top of the file. Errors of `readable` and `flush` mean that it must be dropped."""

    def __init__(
        self,
        number: int,
        channel: Channel,
        peer: tuple[str, int],
        *,
        handshake: Handshake,
        incarnation: int,
        side: Side,
        options: TransferOptions,
        clock: Clock,
        connecting: bool,
        pair: int | None,
        home: int,
    ) -> None:
        # fixed
        self.number = number
        self.pair = number if pair is None else pair  # the first connection of its pair; a listener learns it later
        self.home = home  # which I/O thread it lives in
        self.joined = False  # its pair counts on it
        self.doomed: Verdict | None = None  # it shall go, whichever thread has it
        self.hungry = True  # it looked for frames in vain: wake it when there are some
        self.channel = channel
        self.peer = peer
        self._handshake = handshake
        handshake.bind(channel.binding)
        handshake.offer(side.routes, self._is_same_host)
        self._incarnation = incarnation
        self._side = side
        self._clock = clock
        # state
        self.connecting = connecting  # the TCP connect is under way
        self.interest = 0  # what the selector watches
        self.wants_write = connecting
        self.deadline_s = clock.monotonic() + options.handshake_timeout_s
        self.heard_s = clock.monotonic()  # last byte from the peer
        self.moved_s = clock.monotonic()  # last byte that the kernel took, or nothing was waiting
        self.room_s = clock.monotonic()  # last time that a slot of the peer's ring was free, or none was wanted
        # sending and receiving
        self.sizer = FrameSizer(options)
        self.meter = GoodputMeter()
        self._reader = FrameReader(self, lambda: handshake.authenticated, self._give_credit)
        self._writer = FrameWriter(self._fill, side.frame_sent)
        self.push = self._writer.push
        self.settle = self._writer.settle

    @property
    def sock(self) -> socket.socket:
        return self.channel.sock

    @property
    def ready(self) -> bool:
        """Whether the handshake is over."""
        return self._handshake.done

    @property
    def is_first(self) -> bool:
        """Whether it is the first lane of its pair, which carries the control frames."""
        return self.pair == self.number

    @property
    def peer_incarnation(self) -> bytes:
        return self._handshake.peer_incarnation

    @property
    def place(self) -> Place:
        return self._handshake.place

    @property
    def control_backlog_bytes(self) -> int:
        return self._writer.backlog_bytes

    @property
    def num_staged(self) -> int:
        """Frames that are ready behind the one that is being sent."""
        return self._writer.num_staged

    @property
    def medium(self) -> str:
        """What carries the payloads."""
        return self._handshake.medium

    @property
    def max_payload_bytes(self) -> int:
        """No frame to the peer may have more."""
        outlet = self._handshake.outlet
        return MAX_PAYLOAD_BYTES if outlet is None else outlet.max_payload_bytes

    @property
    def waits_for_ring(self) -> bool:
        """Whether it could send, but for the peer's ring."""
        return self._writer.waits_for_ring

    @property
    def placing(self) -> bool:
        """Whether a payload is on its way to the ring, and it shall look again soon."""
        return self._writer.placing

    @property
    def waits_for_room(self) -> bool:
        """Whether it has no room for what arrives, and shall look again soon."""
        return self._reader.waiting

    @property
    def in_frame(self) -> bool:
        """Whether the rest of a frame is still to come."""
        return self._reader.in_frame and not self._reader.waiting

    def start(self) -> None:
        """Begin the handshake; the TCP connection is up."""
        error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, "connect failed")
        self.connecting = False
        limit_unsent(self.sock, self.sizer.unsent_bytes)
        self.channel.start()
        self._say(self._handshake.start())

    def send(self, frame: bytes) -> None:
        """Queue a whole control frame; `flush` sends it."""
        self._writer.queue(frame)

    def release(self, transfer: bytes) -> None:
        """Let go of the blocks of `transfer`, in the middle of a frame if need be. Any thread."""
        self._writer.release(transfer)
        self._reader.release(transfer)

    def close(self) -> None:
        """Let go of all blocks and close the socket."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
        self.sock.close()
        self._writer.close()
        self._reader.close()
        self._handshake.close()

    def readable(self) -> None:
        """Take what has arrived."""
        if self._reader.read(self.channel, _BUDGET_BYTES):
            self.heard_s = self._clock.monotonic()

    def flush(self) -> None:
        """Send what the kernel takes."""
        if self.connecting:
            return
        if self._reader.waiting:
            self.readable()
        sent = self._writer.write(self.channel, _BUDGET_BYTES)
        waits = self._writer.waits_for_ring and sent < _BUDGET_BYTES  # and no kernel tells when that is over
        self.wants_write = (self._writer.pending or sent >= _BUDGET_BYTES) and not (self.channel.held or waits)
        now_s = self._clock.monotonic()
        if sent or not self.wants_write:
            self.moved_s = now_s
        if not waits:
            self.room_s = now_s
        if sent and self.meter.sent(sent, now_s):
            self._resize()
        if not (self.wants_write or waits):
            self.meter.idle()

    def refuse(self, error: TransferError) -> None:
        """Tell the peer, if it still listens, why the connection ends."""
        if self.connecting or isinstance(error, PeerRefusedError):
            return
        body = Refuse(detail=clip(error.message))
        self.send(encode_control(KINDS[Refuse], NO_TRANSFER, self._incarnation, 0, encode_body(body)))
        try:
            self._writer.write(self.channel, _BUDGET_BYTES)
        except OSError:
            return

    def verdict(self, error: Exception) -> Verdict:
        """Return how the transfers of this connection end because of `error`."""
        name = f"{self.peer[0]}:{self.peer[1]}"
        if isinstance(error, TransferError):
            reason = Reason.PROTOCOL if self.ready else Reason.HANDSHAKE
            return Verdict("failed", reason, f"Connection with {name}: {error.message}")
        if self.connecting:
            return Verdict("failed", Reason.PEER_LOST, f"Could not connect to the KV port {name}: {error}.")
        return Verdict("failed", Reason.PEER_LOST, f"The connection with {name} was lost: {error}.")

    # ── the reader's sink ──

    def control(self, header: Header, body: bytearray) -> None:
        if not self.ready:
            self._shake(header, bytes(body))
            return
        self._require_incarnation(header)
        if header.kind == Kind.CREDIT and self._writer.outlet is not None:
            credit = decode_body(header.kind, body)
            assert isinstance(credit, Credit)
            self._writer.outlet.freed(credit.total)
            self.room_s = self._clock.monotonic()
            return
        if header.kind not in HANDSHAKE_KINDS:
            self._side.control(self.pair, header, body)
            return
        refusal = decode_body(header.kind, body)
        if isinstance(refusal, Refuse):
            raise PeerRefusedError(f"The peer gave up: {clip(refusal.detail)}")
        raise ProtocolError("The peer began a second handshake.")

    def begin_data(self, header: Header) -> Landing | None:
        if not self.ready:
            raise ProtocolError("The peer sent DATA before the handshake was over.")
        self._require_incarnation(header)
        return self._side.begin_data(self.pair, header)

    def data_moved(self, header: Header) -> None:
        self._side.data_moved(self.pair, header)

    def end_data(self, header: Header, checksum: int, landing: Landing) -> None:
        self._side.end_data(self.pair, header, checksum, landing)

    # ── inside ──

    def _give_credit(self, total: int) -> None:
        body = encode_body(Credit(total=total))
        self.send(encode_control(Kind.CREDIT, NO_TRANSFER, self._incarnation, 0, body))

    def _is_same_host(self) -> bool:
        """Whether both ends have the same address."""
        return bool(self.sock.getsockname()[0] == self.sock.getpeername()[0])

    def _shake(self, header: Header, body: bytes) -> None:
        if header.kind not in HANDSHAKE_KINDS:
            raise ProtocolError("The peer did not finish the handshake.")
        self._say(self._handshake.receive(header.kind, body))
        self._require_incarnation(header)
        if self.ready:
            self._writer.outlet, self._reader.inlet = self._handshake.outlet, self._handshake.inlet
            self._side.connected(self)

    def _say(self, messages: list[Message]) -> None:
        for kind, body in messages:
            self.send(encode_control(kind, NO_TRANSFER, self._incarnation, 0, body))

    def _require_incarnation(self, header: Header) -> None:
        if header.incarnation != short_incarnation(self.peer_incarnation):
            raise IntegrityError("A frame comes from another process than the handshake.")

    def _fill(self, ahead: bool) -> None:
        if self.ready:
            self._side.fill(self, ahead=ahead)

    def _resize(self) -> None:
        before = self.sizer.unsent_bytes
        self.sizer.update(self.meter.bytes_per_s)
        if self.sizer.unsent_bytes != before:
            limit_unsent(self.sock, self.sizer.unsent_bytes)
