"""The decode side over TCP: one pooled pair of workers per prefill worker, and the book that decides."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from tollbridge.clock import Clock, SystemClock
from tollbridge.errors import HandshakeError, ProtocolError
from tollbridge.transfer.base import Fingerprint, KVMemory, LoadRequest, Reason, TransferEnd, TransferStatistics
from tollbridge.transfer.channel import maybe_tls
from tollbridge.transfer.coded import coded
from tollbridge.transfer.compose import require_load
from tollbridge.transfer.connection import Connection
from tollbridge.transfer.frames import Codec, Header, transfer_key
from tollbridge.transfer.handshake import DialHandshake, Identity, Place
from tollbridge.transfer.lanes import Lanes
from tollbridge.transfer.ledger import Ledger
from tollbridge.transfer.monitor import Monitor
from tollbridge.transfer.net import is_numeric
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.placed import Routes
from tollbridge.transfer.receive_book import ReceiveBook
from tollbridge.transfer.routes import MediaRoutes, require_media
from tollbridge.transfer.stage import NOWHERE, Fence, Landing
from tollbridge.transfer.switchboard import Switchboard
from tollbridge.transfer.tally import Verdict

logger = logging.getLogger(__name__)

Address = tuple[str, int]


class TcpReceiver:
    """A KVReceiver. Dials on demand, keeps the connection, and dials again when it was lost."""

    def __init__(
        self,
        memory: KVMemory,
        fingerprint: Fingerprint,
        options: TransferOptions | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._memory = memory
        options, clock = options or TransferOptions(), clock or SystemClock()
        require_media(options)
        self._ledger = Ledger(options.media)
        memory, fingerprint = coded(options.codec, memory, fingerprint)
        options = replace(options, streams=options.streams or memory.num_streams)
        self._side = _ReceiveSide(memory, fingerprint, options, clock, self._ledger)

    def open(self, load: LoadRequest) -> None:
        """Ask for `load`; TransferError when its id is malformed or active here, ValueError when it does not fit."""
        transfer_key(load.transfer_id)
        load = replace(load, block_table=tuple(load.block_table))
        require_load(self._memory, load)
        self._ledger.begin(load.transfer_id)
        self._side.lanes.post(partial(self._side.open, load, self._memory.fence()))

    def cancel(self, transfer_id: str, detail: str) -> None:
        """Stop the wire and end as cancelled unless ended."""
        verdict = Verdict("cancelled", Reason.CANCELLED, detail)
        self._side.lanes.post(partial(self._side.cancel, transfer_key(transfer_id), verdict))

    def poll(self) -> list[TransferEnd]:
        return self._ledger.poll()

    def set_listener(self, notify: Callable[[], None]) -> None:
        self._ledger.set_listener(notify)

    def statistics(self) -> TransferStatistics:
        statistics = self._ledger.statistics(
            len(self._side.lanes.connections()), self._side.lanes.num_connections_by_medium()
        )
        return replace(statistics, pending_bytes=self._side.pending_bytes)

    def check(self) -> None:
        self._ledger.check()
        self._side.check()

    def close(self) -> None:
        """End everything as cancelled(shutdown), join the threads, close the sockets. Idempotent."""
        self._ledger.close()
        self._side.lanes.stop()
        self._side.routes.close()
        self._side.stage.close()


class _ReceiveSide:
    """What the I/O threads share: the switchboards' Owner. The book is used inside turns of the monitor only."""

    def __init__(
        self, memory: KVMemory, fingerprint: Fingerprint, options: TransferOptions, clock: Clock, ledger: Ledger
    ) -> None:
        self._clock = clock
        self._ledger = ledger
        self._codec = Codec[fingerprint.codec.upper()]
        self._identity = Identity(fingerprint=fingerprint, secret=options.secret or b"")
        self._pool: dict[Address, int] = {}  # the pair of each peer
        self._narrow: set[int] = set()  # pairs whose other lanes are still to be dialled
        self._incarnations: dict[Address, bytes] = {}
        incarnation = self._identity.short
        self.stage = memory.stage(
            max_payload_bytes=options.max_frame_bytes or memory.max_frame_bytes, ring_bytes=options.ring_bytes
        )
        self.routes: Routes = MediaRoutes(options, self.stage, granule_bytes=memory.granule_bytes, expects=self.active)
        self.lanes = Lanes(
            self,
            options,
            clock,
            self.stage,
            tls=maybe_tls(options.tls),
            incarnation=incarnation,
            name="kv-receive",
        )
        self._monitor = Monitor(self.lanes, ledger)
        self._book = ReceiveBook(
            memory,
            incarnation=incarnation,
            options=options,
            clock=clock,
            ledger=self._monitor,
            wire=self._monitor,
            max_payload_bytes=self.stage.max_payload_bytes,
        )
        self.lanes.start()

    @property
    def pending_bytes(self) -> int:
        return self._book.pending_bytes  # outside a turn of the monitor: see there

    # ── the engine, by way of the first thread ──

    def open(self, load: LoadRequest, fence: Fence) -> None:
        """Enter `load` on the pair of its peer, dialling when there is none."""
        address = (load.host, load.port)
        with self._monitor:
            number = self._pool.get(address)
            is_new = number is None
            if number is None:
                number = self._pool[address] = self.lanes.first.reserve()
                self._narrow.add(number)
            if not self._book.busy(number):
                for lane in self.lanes.of(number):
                    lane.heard_s = self._clock.monotonic()  # its silence so far was idleness
            self._book.open(load, number, connected=bool(self.lanes.of(number)), fence=fence)
        self.routes.stir()
        if is_new:
            self._dial(number, address)

    def cancel(self, transfer: bytes, verdict: Verdict) -> None:
        with self._monitor:
            self._book.cancel(transfer, verdict)

    def check(self) -> None:
        with self._monitor:
            self._book.check()
        self.stage.check()

    # ── Owner ──

    def connected(self, connection: Connection) -> None:
        """Take a lane in. HandshakeError when its pair is gone, or the first lane met another process."""
        with self._monitor:
            if not connection.is_first:
                first = next(iter(self.lanes.of(connection.pair)), None)
                if first is None or first.peer_incarnation != connection.peer_incarnation:
                    raise HandshakeError("The first connection of this pair is gone.")
                self.lanes.join(connection)
                return
            self._note_restart(connection)
            logger.info("KV from %s:%d comes over %s.", *connection.peer, connection.medium)
            self.lanes.join(connection)
            self._book.connected(connection.number)

    def lost(self, connection: Connection, verdict: Verdict) -> None:
        if not connection.is_first and not connection.joined:
            logger.warning("Lane to %s:%d was not used: %s", *connection.peer, verdict.detail)
            return
        self._end_pair(connection.pair, verdict)
        self.lanes.part(connection, verdict)

    def busy(self, pair: int) -> bool:
        return self._book.busy(pair)

    def active(self) -> bool:
        return len(self._book) > 0

    def tick(self) -> None:
        with self._monitor:
            self._book.tick()

    def crashed(self) -> None:
        self.lanes.request_stop()

    def closing(self) -> None:
        self._ledger.close()

    def stopped(self) -> None:
        with self._monitor:
            self._book.close(Verdict("cancelled", Reason.SHUTDOWN, "This worker is shutting down."))

    def control(self, pair: int, header: Header, body: bytearray) -> None:
        with self._monitor:
            self._book.control(pair, header, body)
            widen = pair in self._narrow  # it answers, so it has taken in the first lane: others may join that
            self._narrow.discard(pair)
        if widen:
            self._dial_others(pair)

    def fill(self, connection: Connection, *, ahead: bool) -> None:
        """Nothing: decode sends control frames only."""

    def frame_sent(self, transfer: bytes) -> None:
        """Nothing: see fill."""

    def begin_data(self, pair: int, header: Header) -> Landing | None:
        if header.codec != self._codec:
            raise ProtocolError(f"Prefill sent codec {header.codec}, but the handshake agreed on {self._codec.name}.")
        with self._monitor:
            if not self.stage.has_room():
                return None
            place = self._book.begin_data(pair, header)
            return NOWHERE if place is None else self.stage.land(header.transfer, *place)

    def data_moved(self, pair: int, header: Header) -> None:
        self._book.data_moved(pair, header)  # no turn: it only notes the time

    def end_data(self, pair: int, header: Header, checksum: int, landing: Landing) -> None:
        with self._monitor:
            self._book.end_data(pair, header, checksum, landing)

    # ── inside ──

    def _note_restart(self, connection: Connection) -> None:
        before = self._incarnations.get(connection.peer)
        if before is not None and before != connection.peer_incarnation:
            logger.info("The prefill worker at %s:%d was restarted.", *connection.peer)
        self._incarnations[connection.peer] = connection.peer_incarnation

    def _end_pair(self, pair: int, verdict: Verdict) -> None:
        with self._monitor:
            self._pool = {address: number for address, number in self._pool.items() if number != pair}
            self._narrow.discard(pair)
            self._book.lost(pair, verdict)
            self._book.forget(pair)

    def _dial(self, number: int, address: Address) -> None:
        """Connect as `number`; a name is resolved in a thread of its own, because that can block for long."""
        if is_numeric(*address):
            self._connect(number, address)
            return
        threading.Thread(target=self._resolve, args=(number, address), name="kv-resolve", daemon=True).start()

    def _resolve(self, number: int, address: Address) -> None:
        try:
            found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
            numeric = str(found[0][4][0])
        except OSError as error:
            self.lanes.post(partial(self._unreachable, number, address, error))
            return
        self.lanes.post(partial(self._connect, number, address, numeric))

    def _connect(self, number: int, address: Address, numeric: str | None = None) -> None:
        """Start the TCP connect of a first lane; the switchboard goes on when it is through."""
        try:
            sock = _begin_connect(numeric or address[0], address[1])
        except OSError as error:
            self._unreachable(number, address, error)
            return
        self.lanes.first.add(sock, address, DialHandshake(self._identity), connecting=True, number=number)

    def _unreachable(self, number: int, address: Address, error: OSError) -> None:
        detail = f"Could not connect to the KV port {address[0]}:{address[1]}: {error}."
        self._end_pair(number, Verdict("failed", Reason.PEER_LOST, detail))

    def _dial_others(self, pair: int) -> None:
        """Dial lanes 1, 2, ... of a pair whose first lane is up, each in the thread of its number."""
        first = self.lanes.of(pair)[0]
        where = first.sock.getpeername()[:2]
        for index, board in enumerate(self.lanes.boards[1:], start=1):
            board.post(partial(self._connect_lane, board, first, where, index))

    def _connect_lane(self, board: Switchboard, first: Connection, where: Address, index: int) -> None:
        try:
            sock = _begin_connect(*where)
        except OSError as error:
            logger.warning("Lane to %s:%d was not used: %s", *first.peer, error)
            return
        handshake = DialHandshake(self._identity, place=Place(first.place.pair, index))
        board.add(sock, first.peer, handshake, connecting=True, pair=first.number)


def _begin_connect(host: str, port: int) -> socket.socket:
    """Return a socket whose connect to a numeric address is under way."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    code = sock.connect_ex((host, port))
    if code not in (0, errno.EINPROGRESS):
        sock.close()
        raise OSError(code, os.strerror(code))
    return sock
