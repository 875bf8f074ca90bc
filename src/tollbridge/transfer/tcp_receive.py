"""The decode side over TCP: one pooled connection per prefill worker, and the book that decides."""

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
from tollbridge.transfer.base import Fingerprint, KVMemory, LoadRequest, Reason, TransferEnd, TransferStatistics
from tollbridge.transfer.channel import maybe_tls
from tollbridge.transfer.compose import require_table
from tollbridge.transfer.frames import Header, transfer_key
from tollbridge.transfer.handshake import DialHandshake, Identity
from tollbridge.transfer.ledger import Ledger
from tollbridge.transfer.net import is_numeric
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.receive_book import ReceiveBook
from tollbridge.transfer.switchboard import Switchboard
from tollbridge.transfer.tally import Verdict
from tollbridge.transfer.writer import OutgoingFrame

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
        self._ledger = Ledger("tcp")
        options, clock = options or TransferOptions(), clock or SystemClock()
        self._side = _ReceiveSide(memory, fingerprint, options, clock, self._ledger)

    def open(self, load: LoadRequest) -> None:
        """Ask for `load`; TransferError when its id is malformed or active here, ValueError when the table is short."""
        transfer_key(load.transfer_id)
        load = replace(load, block_table=tuple(load.block_table))
        require_table(self._memory, load.block_table, load.first_token + load.num_tokens)
        self._ledger.begin(load.transfer_id)
        self._side.board.post(partial(self._side.open, load))

    def cancel(self, transfer_id: str, detail: str) -> None:
        """Stop the wire and end as cancelled unless ended."""
        verdict = Verdict("cancelled", Reason.CANCELLED, detail)
        self._side.board.post(partial(self._side.book.cancel, transfer_key(transfer_id), verdict))

    def poll(self) -> list[TransferEnd]:
        return self._ledger.poll()

    def set_listener(self, notify: Callable[[], None]) -> None:
        self._ledger.set_listener(notify)

    def statistics(self) -> TransferStatistics:
        return self._ledger.statistics(self._side.board.num_connections)

    def check(self) -> None:
        self._ledger.check()
        self._side.board.call(self._side.book.check)

    def close(self) -> None:
        """End everything as cancelled(shutdown), join the thread, close the sockets. Idempotent."""
        self._ledger.close()
        self._side.board.stop()


class _ReceiveSide:
    """What lives in the I/O thread: the switchboard's Owner."""

    def __init__(
        self, memory: KVMemory, fingerprint: Fingerprint, options: TransferOptions, clock: Clock, ledger: Ledger
    ) -> None:
        self._clock = clock
        self._ledger = ledger
        self._identity = Identity(fingerprint=fingerprint, secret=options.secret or b"")
        self._pool: dict[Address, int] = {}  # one connection per peer; several streams would make this a list
        self._incarnations: dict[Address, bytes] = {}
        incarnation = self._identity.short
        tls = maybe_tls(options.tls)
        self.board = Switchboard(self, options, clock, tls=tls, incarnation=incarnation, name="kv-receive")
        self.book = ReceiveBook(
            memory, incarnation=incarnation, options=options, clock=clock, ledger=ledger, wire=self.board
        )
        self.board.start()

    def open(self, load: LoadRequest) -> None:
        """Enter `load` on the connection of its peer, dialling when there is none."""
        address = (load.host, load.port)
        number = self._pool.get(address)
        is_new = number is None
        if number is None:
            number = self._pool[address] = self.board.reserve()
        target = self.board.get(number)
        if target is not None and not self.book.busy(number):
            target.heard_s = self._clock.monotonic()  # its silence so far was idleness
        self.book.open(load, number, connected=target is not None and target.ready)
        if is_new:
            self._dial(number, address)

    # ── Owner ──

    def connected(self, connection: int) -> None:
        target = self.board.get(connection)
        assert target is not None
        before = self._incarnations.get(target.peer)
        if before is not None and before != target.peer_incarnation:
            logger.info("The prefill worker at %s:%d was restarted.", *target.peer)
        self._incarnations[target.peer] = target.peer_incarnation
        self.book.connected(connection)

    def lost(self, connection: int, verdict: Verdict) -> None:
        self._pool = {address: number for address, number in self._pool.items() if number != connection}
        self.book.lost(connection, verdict)
        self.book.forget(connection)

    def busy(self, connection: int) -> bool:
        return self.book.busy(connection)

    def active(self) -> bool:
        return len(self.book) > 0

    def tick(self) -> None:
        self.book.tick()

    def closing(self) -> None:
        self._ledger.close()

    def stopped(self) -> None:
        self.book.close(Verdict("cancelled", Reason.SHUTDOWN, "This worker is shutting down."))

    def control(self, connection: int, header: Header, body: bytearray) -> None:
        self.book.control(connection, header, body)

    def next_frame(self, connection: int) -> OutgoingFrame | None:
        return None  # decode sends control frames only

    def frame_sent(self, transfer: bytes) -> None:
        """Nothing: see next_frame."""

    def begin_data(self, connection: int, header: Header) -> list[memoryview] | None:
        return self.book.begin_data(connection, header)

    def data_moved(self, connection: int, header: Header) -> None:
        self.book.data_moved(connection, header)

    def end_data(self, connection: int, header: Header, checksum: int) -> None:
        self.book.end_data(connection, header, checksum)

    # ── inside ──

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
            self.board.post(partial(self._unreachable, number, address, error))
            return
        self.board.post(partial(self._connect, number, address, numeric))

    def _connect(self, number: int, address: Address, numeric: str | None = None) -> None:
        """Start a TCP connect; the switchboard goes on when it is through."""
        host, port = numeric or address[0], address[1]
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            code = sock.connect_ex((host, port))
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
        except OSError as error:
            sock.close()
            self._unreachable(number, address, error)
            return
        self.board.add(sock, address, DialHandshake(self._identity), connecting=True, number=number)

    def _unreachable(self, number: int, address: Address, error: OSError) -> None:
        detail = f"Could not connect to the KV port {address[0]}:{address[1]}: {error}."
        self.lost(number, Verdict("failed", Reason.PEER_LOST, detail))
