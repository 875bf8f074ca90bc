"""The prefill side over TCP: a listener, the connections of the decode workers, and the book that decides."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from tollbridge.clock import Clock, SystemClock
from tollbridge.errors import StartupError
from tollbridge.transfer.base import Fingerprint, KVMemory, Reason, TransferEnd, TransferStatistics
from tollbridge.transfer.channel import maybe_tls
from tollbridge.transfer.compose import compose, require_table
from tollbridge.transfer.frames import HEADER_BYTES, Header, transfer_key
from tollbridge.transfer.handshake import AcceptHandshake, Identity
from tollbridge.transfer.ledger import Ledger
from tollbridge.transfer.net import listen
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.pacing import TokenBucket
from tollbridge.transfer.send_book import SendBook
from tollbridge.transfer.switchboard import Switchboard
from tollbridge.transfer.tally import Verdict
from tollbridge.transfer.writer import OutgoingFrame

logger = logging.getLogger(__name__)


class TcpSender:
    """A KVSender. Listens from construction on; `close` stops the thread and the listener.

    Raises ConfigError when the address is reachable from other hosts and there is no secret, StartupError when it
    cannot be bound.
    """

    def __init__(
        self,
        memory: KVMemory,
        fingerprint: Fingerprint,
        options: TransferOptions | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._options = options or TransferOptions()
        self._options.require_secret()
        self._ledger = Ledger("tcp")
        self._side = _SendSide(memory, fingerprint, self._options, clock or SystemClock(), self._ledger)
        self._memory = memory

    @property
    def address(self) -> tuple[str, int]:
        """Where decode dials, as (host, port)."""
        host, port = self._side.bound
        return self._options.advertise_host or host, port

    def register(self, transfer_id: str, *, digest: bytes, num_tokens: int) -> None:
        """Announce a transfer; TransferError when its id is malformed or active here."""
        transfer = transfer_key(transfer_id)
        self._ledger.begin(transfer_id)
        self._side.board.post(partial(self._side.book.register, transfer, digest, num_tokens))

    def publish(
        self, transfer_id: str, block_table: Sequence[int], num_tokens: int, *, layer: int | None = None
    ) -> None:
        """Say what is in memory; ValueError when `block_table` does not cover it or `layer` does not exist."""
        table = tuple(block_table)
        require_table(self._memory, table, num_tokens, layer)
        self._side.board.post(partial(self._side.publish, transfer_key(transfer_id), table, num_tokens, layer))

    def rewind(self, transfer_id: str) -> None:
        """Forget what was published; on return no thread reads the blocks."""
        self._side.board.call(partial(self._side.book.rewind, transfer_key(transfer_id)))

    def cancel(self, transfer_id: str, detail: str) -> None:
        """End the transfer as cancelled unless it has ended."""
        verdict = Verdict("cancelled", Reason.CANCELLED, detail)
        self._side.board.post(partial(self._side.book.cancel, transfer_key(transfer_id), verdict))

    def poll(self) -> list[TransferEnd]:
        return self._ledger.poll()

    def set_listener(self, notify: Callable[[], None]) -> None:
        self._ledger.set_listener(notify)

    def statistics(self) -> TransferStatistics:
        statistics = self._ledger.statistics(self._side.board.num_connections)
        goodput = self._side.board.goodput_bytes_per_s or statistics.goodput_bytes_per_s
        return replace(statistics, goodput_bytes_per_s=goodput)  # a transfer's own rate includes waits for the engine

    def check(self) -> None:
        self._ledger.check()
        self._side.board.call(self._side.book.check)

    def close(self) -> None:
        """End everything as cancelled(shutdown), join the thread, close the sockets. Idempotent."""
        self._ledger.close()
        self._side.board.stop()


class _SendSide:
    """What lives in the I/O thread: the switchboard's Owner."""

    def __init__(
        self, memory: KVMemory, fingerprint: Fingerprint, options: TransferOptions, clock: Clock, ledger: Ledger
    ) -> None:
        self._memory = memory
        self._options = options
        self._clock = clock
        self._ledger = ledger
        self._identity = Identity(fingerprint=fingerprint, secret=options.secret or b"")
        self._bucket = TokenBucket(options.bandwidth_cap_bytes_per_s, clock.monotonic())
        tls = maybe_tls(options.tls)
        self._listener = _listen(options)
        self.bound: tuple[str, int] = self._listener.getsockname()[:2]
        incarnation = self._identity.short
        name = f"kv-send-{self.bound[1]}"
        self.board = Switchboard(self, options, clock, tls=tls, incarnation=incarnation, name=name)
        self.book = SendBook(
            memory, incarnation=incarnation, options=options, clock=clock, ledger=ledger, wire=self.board
        )
        self.board.listen(self._listener, self._accept)
        self.board.start()

    def publish(self, transfer: bytes, table: tuple[int, ...], num_tokens: int, layer: int | None) -> None:
        connection = self.book.publish(transfer, table, num_tokens, layer)
        if connection is not None:
            self.board.flush_soon(connection)

    # ── Owner ──

    def connected(self, connection: int) -> None:
        target = self.board.get(connection)
        assert target is not None
        logger.debug("Decode worker %s:%d (%s) connected.", *target.peer, target.peer_incarnation.hex()[:8])

    def lost(self, connection: int, verdict: Verdict) -> None:
        self.book.lost(connection, verdict)

    def busy(self, connection: int) -> bool:
        return self.book.busy(connection)

    def active(self) -> bool:
        return len(self.book) > 0

    def tick(self) -> None:
        self.book.tick()

    def closing(self) -> None:
        self._ledger.close()

    def stopped(self) -> None:
        self._listener.close()
        self.book.close(Verdict("cancelled", Reason.SHUTDOWN, "This worker is shutting down."))

    def control(self, connection: int, header: Header, body: bytearray) -> None:
        self.book.control(connection, header, body)

    def next_frame(self, connection: int) -> OutgoingFrame | None:
        target = self.board.get(connection)
        if target is None or not self.book.busy(connection):
            return None
        now_s = self._clock.monotonic()
        wait_s = self._bucket.wait_s(now_s)
        if wait_s > 0:
            self.board.flush_at(connection, now_s + wait_s)
            return None
        taken = self.book.take(connection, target.sizer.frame_bytes, target.meter.bytes_per_s)
        if taken is None:
            return None
        session, chunk = taken
        payload_bytes = chunk.num_tokens * self._memory.token_bytes
        self._bucket.take(payload_bytes, now_s)
        buffers = compose(session, chunk, self._memory, self._identity.short)
        return OutgoingFrame(session.transfer, buffers, HEADER_BYTES + payload_bytes)

    def frame_sent(self, transfer: bytes) -> None:
        self.book.frame_sent(transfer)

    def begin_data(self, connection: int, header: Header) -> list[memoryview] | None:
        return None  # decode sends no DATA; whatever comes is drained

    def data_moved(self, connection: int, header: Header) -> None:
        """Nothing: see begin_data."""

    def end_data(self, connection: int, header: Header, checksum: int) -> None:
        """Nothing: see begin_data."""

    # ── inside ──

    def _accept(self, mask: int) -> None:
        try:
            sock, peer = self._listener.accept()
        except OSError:
            return  # the dialler left before we came
        connections = self.board.connections()
        unauthenticated = sum(not connection.ready for connection in connections)
        if unauthenticated >= self._options.max_unauthenticated or len(connections) >= self._options.max_connections:
            sock.close()
            return
        self.board.add(sock, (str(peer[0]), int(peer[1])), AcceptHandshake(self._identity), connecting=False)


def _listen(options: TransferOptions) -> socket.socket:
    try:
        return listen(options)
    except OSError as error:
        raise StartupError(
            f"The KV port {options.bind_host}:{options.bind_port} cannot be bound ({error}): choose another, or 0."
        ) from None
