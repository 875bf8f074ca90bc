"""The prefill side over TCP: a listener, the connections of the decode workers, and the book that decides."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from tollbridge.clock import Clock, SystemClock
from tollbridge.errors import HandshakeError, StartupError
from tollbridge.transfer.base import Fingerprint, KVMemory, Published, Reason, TransferEnd, TransferStatistics
from tollbridge.transfer.channel import maybe_tls
from tollbridge.transfer.coded import coded
from tollbridge.transfer.compose import compose, require_table
from tollbridge.transfer.connection import Connection
from tollbridge.transfer.frames import MAX_PAYLOAD_BYTES, NO_TRANSFER, Codec, Header, transfer_key
from tollbridge.transfer.gate import Gate
from tollbridge.transfer.handshake import AcceptHandshake, Identity
from tollbridge.transfer.lanes import Lanes
from tollbridge.transfer.ledger import Ledger
from tollbridge.transfer.monitor import Monitor
from tollbridge.transfer.net import listen
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.pacing import TokenBucket
from tollbridge.transfer.placed import Routes
from tollbridge.transfer.routes import MediaRoutes, require_media
from tollbridge.transfer.send_book import SendBook
from tollbridge.transfer.stage import NOWHERE, PASSED, Landing
from tollbridge.transfer.tally import Verdict

logger = logging.getLogger(__name__)

_ROOM_S = 0.001  # how soon to look again for room in the stage


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
        require_media(self._options)
        self._ledger = Ledger(self._options.media)
        memory, fingerprint = coded(self._options.codec, memory, fingerprint)
        self._options = replace(self._options, streams=self._options.streams or memory.num_streams)
        self._side = _SendSide(memory, fingerprint, self._options, clock or SystemClock(), self._ledger)
        self._memory = memory
        self._gate = Gate(self._side.lanes.post, name=f"kv-gate-{self._side.bound[1]}")

    @property
    def address(self) -> tuple[str, int]:
        """Where decode dials, as (host, port)."""
        host, port = self._side.bound
        return self._options.advertise_host or host, port

    def register(self, transfer_id: str, *, digest: bytes, num_tokens: int) -> None:
        """Announce a transfer; TransferError when its id is malformed or active here."""
        transfer = transfer_key(transfer_id)
        self._ledger.begin(transfer_id)
        self._side.lanes.post(partial(self._side.register, transfer, digest, num_tokens))

    def publish(
        self, transfer_id: str, block_table: Sequence[int], num_tokens: int, *, layer: int | None = None
    ) -> None:
        """Say what is in memory; ValueError when `block_table` does not cover it or `layer` does not exist."""
        self.publish_all([Published(transfer_id, block_table, num_tokens)], layer=layer)

    def publish_all(self, chunks: Sequence[Published], *, layer: int | None = None) -> None:
        """The same for the chunks of one forward pass."""
        fence = self._memory.fence()
        for chunk in chunks:
            table = tuple(chunk.block_table)
            require_table(self._memory, table, chunk.num_tokens, layer)
            transfer = transfer_key(chunk.transfer_id)
            task = partial(self._side.publish, transfer, table, chunk.num_tokens, layer)
            self._gate.after(transfer, fence, task)

    def rewind(self, transfer_id: str) -> None:
        """Forget what was published; on return no thread reads the blocks."""
        transfer = transfer_key(transfer_id)
        self._gate.forget(transfer)
        self._side.lanes.call(partial(self._side.rewind, transfer))

    def cancel(self, transfer_id: str, detail: str) -> None:
        """End the transfer as cancelled unless it has ended."""
        verdict = Verdict("cancelled", Reason.CANCELLED, detail)
        self._side.lanes.post(partial(self._side.cancel, transfer_key(transfer_id), verdict))

    def shed(self, transfer_ids: Sequence[str], max_blocks: int, *, unsent_too: bool) -> None:
        """Fail finished sends until the others hold at most `max_blocks`."""
        transfers = [transfer_key(transfer_id) for transfer_id in transfer_ids]
        task = partial(self._side.shed, transfers, max_blocks, unsent_too=unsent_too)
        self._gate.after(NO_TRANSFER, PASSED, task)  # behind what was published before: that is what it counts

    def poll(self) -> list[TransferEnd]:
        return self._ledger.poll()

    def set_listener(self, notify: Callable[[], None]) -> None:
        self._ledger.set_listener(notify)

    def statistics(self) -> TransferStatistics:
        statistics = self._ledger.statistics(
            len(self._side.lanes.connections()), self._side.lanes.num_connections_by_medium()
        )
        goodput = self._side.lanes.best_goodput_bytes_per_s or statistics.goodput_bytes_per_s
        # a transfer's own rate includes waits for the engine
        return replace(statistics, goodput_bytes_per_s=goodput, pending_bytes=self._side.pending_bytes)

    def check(self) -> None:
        self._ledger.check()
        self._side.check()

    def close(self) -> None:
        """End everything as cancelled(shutdown), join the threads, close the sockets. Idempotent."""
        self._ledger.close()
        self._gate.close()
        self._side.lanes.stop()
        self._side.routes.close()
        self._side.stage.close()


class _SendSide:
    """What the I/O threads share: the switchboards' Owner. The book is used inside turns of the monitor only."""

    def __init__(
        self, memory: KVMemory, fingerprint: Fingerprint, options: TransferOptions, clock: Clock, ledger: Ledger
    ) -> None:
        self._options = options
        self._clock = clock
        self._ledger = ledger
        self._codec = Codec[fingerprint.codec.upper()]
        self._identity = Identity(fingerprint=fingerprint, secret=options.secret or b"")
        self._bucket = TokenBucket(options.bandwidth_cap_bytes_per_s, clock.monotonic())
        self._pairs: dict[tuple[bytes, bytes], int] = {}  # (incarnation, pair id) -> number of the first lane
        tls = maybe_tls(options.tls)
        self._listener = _listen(options)
        self.bound: tuple[str, int] = self._listener.getsockname()[:2]
        incarnation = self._identity.short
        self.stage = memory.stage(
            max_payload_bytes=options.max_frame_bytes or memory.max_frame_bytes, ring_bytes=options.ring_bytes
        )
        self.routes: Routes = MediaRoutes(options, self.stage, granule_bytes=memory.granule_bytes)
        self.lanes = Lanes(
            self,
            options,
            clock,
            self.stage,
            tls=tls,
            incarnation=incarnation,
            name=f"kv-send-{self.bound[1]}",
        )
        self._monitor = Monitor(self.lanes, ledger)
        self._book = SendBook(
            memory, incarnation=incarnation, options=options, clock=clock, ledger=self._monitor, wire=self._monitor
        )
        self.lanes.first.listen(self._listener, self._accept)
        self.lanes.start()

    @property
    def pending_bytes(self) -> int:
        return self._book.pending_bytes  # outside a turn of the monitor: see there

    # ── the engine, by way of the first thread ──

    def register(self, transfer: bytes, digest: bytes, num_tokens: int) -> None:
        with self._monitor:
            self._wake(self._book.register(transfer, digest, num_tokens))

    def publish(self, transfer: bytes, table: tuple[int, ...], num_tokens: int, layer: int | None) -> None:
        with self._monitor:
            self._wake(self._book.publish(transfer, table, num_tokens, layer))

    def rewind(self, transfer: bytes) -> None:
        with self._monitor:
            self._book.rewind(transfer)

    def cancel(self, transfer: bytes, verdict: Verdict) -> None:
        with self._monitor:
            self._book.cancel(transfer, verdict)

    def shed(self, transfers: Sequence[bytes], max_blocks: int, *, unsent_too: bool) -> None:
        with self._monitor:
            self._book.shed(transfers, max_blocks, unsent_too=unsent_too)

    def check(self) -> None:
        with self._monitor:
            self._book.check()
        self.stage.check()

    # ── Owner ──

    def connected(self, connection: Connection) -> None:
        """Take a lane in. HandshakeError when its pair is not here."""
        pair_id, lane = connection.place
        key = (connection.peer_incarnation, pair_id)
        with self._monitor:
            if lane == 0 and key not in self._pairs:
                self._pairs[key] = connection.number
            elif lane == 0 or key not in self._pairs:
                raise HandshakeError(f"Lane {lane} names a pair of connections that is not here.")
            connection.pair = self._pairs[key]
            self.lanes.join(connection)
        self.lanes.post(partial(self.lanes.move, connection))
        logger.info(
            "Decode worker %s:%d (%s), lane %d: KV goes over %s.",
            *connection.peer, connection.peer_incarnation.hex()[:8], lane, connection.medium,
        )  # fmt: skip

    def lost(self, connection: Connection, verdict: Verdict) -> None:
        if connection.joined:
            with self._monitor:
                self._pairs = {key: pair for key, pair in self._pairs.items() if pair != connection.pair}
                self._book.lost(connection.pair, verdict)
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
        self._listener.close()
        with self._monitor:
            self._book.close(Verdict("cancelled", Reason.SHUTDOWN, "This worker is shutting down."))

    def control(self, pair: int, header: Header, body: bytearray) -> None:
        with self._monitor:
            self._book.control(pair, header, body)
            self._wake(pair)

    def fill(self, connection: Connection, *, ahead: bool) -> None:
        depth = self.stage.depth if ahead else 1
        while connection.num_staged < depth and self._stage_one(connection):
            pass

    def frame_sent(self, transfer: bytes) -> None:
        with self._monitor:
            self._book.frame_sent(transfer)

    def begin_data(self, pair: int, header: Header) -> Landing | None:
        return NOWHERE  # decode sends no DATA; whatever comes is drained

    def data_moved(self, pair: int, header: Header) -> None:
        """Nothing: see begin_data."""

    def end_data(self, pair: int, header: Header, checksum: int, landing: Landing) -> None:
        """Nothing: see begin_data."""

    # ── inside ──

    def _stage_one(self, connection: Connection) -> bool:
        """Push the next frame of the pair to one of its lanes; return whether there was one."""
        now_s = self._clock.monotonic()
        with self._monitor:
            wait_s = self._bucket.wait_s(now_s) if self.stage.has_room() else _ROOM_S
            if wait_s > 0 and self._book.busy(connection.pair):
                self.lanes.flush_at(connection, now_s + wait_s)
                return False
            limit = min(self.stage.max_payload_bytes, connection.max_payload_bytes)
            max_bytes = min(connection.sizer.frame_bytes, limit, self._share(connection.pair))
            taken = self._book.take(connection.pair, max_bytes, self.lanes.goodput_bytes_per_s(connection.pair))
            connection.hungry = taken is None
            if taken is None:
                return False
            frame = compose(*taken, self.stage, self._identity.short, codec=self._codec)
            self._bucket.take(frame.parcel.num_bytes, now_s)
            connection.push(frame)
            self._wake(connection.pair)
        return True

    def _share(self, pair: int) -> int:
        """Return how much one lane may take: less towards the end, so that no lane is left with a large last frame."""
        num_lanes = len(self.lanes.of(pair))
        if num_lanes <= 1:
            return MAX_PAYLOAD_BYTES
        return max(self.stage.max_payload_bytes // 4, self._book.remaining_bytes(pair) // num_lanes)

    def _wake(self, pair: int | None) -> None:
        """Let a lane look for frames, if there are any."""
        if pair is not None and self._book.has_data(pair):
            self.lanes.wake(pair)

    def _accept(self, mask: int) -> None:
        try:
            sock, peer = self._listener.accept()
        except OSError:
            return  # the dialler left before we came
        connections = self.lanes.connections()
        unauthenticated = sum(not connection.ready for connection in connections)
        if unauthenticated >= self._options.max_unauthenticated or len(connections) >= self._options.max_connections:
            sock.close()
            return
        self.lanes.first.add(sock, (str(peer[0]), int(peer[1])), AcceptHandshake(self._identity), connecting=False)


def _listen(options: TransferOptions) -> socket.socket:
    try:
        return listen(options)
    except OSError as error:
        raise StartupError(
            f"The KV port {options.bind_host}:{options.bind_port} cannot be bound ({error}): choose another, or 0."
        ) from None
