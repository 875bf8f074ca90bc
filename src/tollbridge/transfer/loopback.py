"""KV inside one process, for tests of engines: the same books and frames as TCP, without sockets, threads or waiting.

A `LoopbackNetwork` is the wire. Every call on a sender or receiver that may have something to move runs the wire until
it is quiet, in the caller's thread, so a test is deterministic: when `publish` returns, what can be sent has arrived.
Deadlines and heartbeats run on `poll`, under the injected clock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from xxhash import xxh3_64

from tollbridge.clock import Clock, SystemClock
from tollbridge.errors import HandshakeError
from tollbridge.transfer.base import (
    Fingerprint,
    KVMemory,
    LoadRequest,
    Published,
    Reason,
    TransferEnd,
    TransferStatistics,
)
from tollbridge.transfer.compose import compose, require_load, require_table
from tollbridge.transfer.frames import HEADER_BYTES, check_body, parse_header, transfer_key
from tollbridge.transfer.handshake import require_same
from tollbridge.transfer.ledger import Ledger
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.receive_book import ReceiveBook
from tollbridge.transfer.send_book import SendBook
from tollbridge.transfer.stage import Stage
from tollbridge.transfer.tally import Verdict
from tollbridge.transfer.writer import OutgoingFrame

_HOST = "loopback"
_FRAME_BYTES = 256 * 1024


class LoopbackNetwork:
    """Connects the senders and receivers made from it. Senders are at ("loopback", 1), ("loopback", 2), ..."""

    def __init__(self, options: TransferOptions | None = None, *, clock: Clock | None = None) -> None:
        self.options = options or TransferOptions()
        self.clock = clock or SystemClock()
        self.lock = threading.RLock()  # one wire, one thread on it at a time
        self._senders: dict[int, LoopbackSender] = {}
        self._links: dict[int, tuple[LoopbackSender, LoopbackReceiver]] = {}
        self._control: deque[tuple[bool, int, bytes]] = deque()  # (to the receiver, connection, frame)
        self._next_port = 0
        self._next_link = 0
        self._running = False

    def sender(self, memory: KVMemory, fingerprint: Fingerprint) -> LoopbackSender:
        """Return a new prefill side."""
        with self.lock:
            self._next_port += 1
            sender = self._senders[self._next_port] = LoopbackSender(self, memory, fingerprint, self._next_port)
            return sender

    def receiver(self, memory: KVMemory, fingerprint: Fingerprint) -> LoopbackReceiver:
        """Return a new decode side."""
        return LoopbackReceiver(self, memory, fingerprint)

    # ── the two sides; the lock is held ──

    def link(self, receiver: LoopbackReceiver, host: str, port: int) -> int:
        """Connect, and return the connection's number. OSError when nobody listens, HandshakeError on a mismatch."""
        sender = self._senders.get(port)
        if sender is None or host != _HOST:
            raise ConnectionRefusedError(f"nobody listens on {host}:{port}")
        require_same(receiver.fingerprint, sender.fingerprint)
        self._next_link += 1
        self._links[self._next_link] = (sender, receiver)
        return self._next_link

    def unlink(self, side: LoopbackSender | LoopbackReceiver) -> None:
        """Cut all connections of a side that closes."""
        self._senders = {port: sender for port, sender in self._senders.items() if sender is not side}
        for number, (sender, receiver) in list(self._links.items()):
            if side in (sender, receiver):
                del self._links[number]
                verdict = Verdict("failed", Reason.PEER_LOST, "The other worker closed.")
                sender.book.lost(number, verdict)
                receiver.lost(number, verdict)

    def num_links(self, side: LoopbackSender | LoopbackReceiver) -> int:
        return sum(side in pair for pair in self._links.values())

    def emit(self, to_receiver: bool, connection: int, frame: bytes) -> None:
        self._control.append((to_receiver, connection, frame))

    def run(self) -> None:
        """Move all that can move; a call from inside (by an end's listener) leaves it to the one that is running."""
        if self._running:
            return
        self._running = True
        try:
            while self._deliver_control() or self._deliver_data():
                pass
        finally:
            self._running = False

    def tick(self) -> None:
        """Run heartbeats and deadlines of everyone, heartbeats first: a test's clock may jump past both at once."""
        with self.lock:
            for sender in list(self._senders.values()):
                sender.book.tick()
            self.run()
            for receiver in {id(receiver): receiver for _, receiver in self._links.values()}.values():
                receiver.book.tick()
            self.run()

    # ── inside ──

    def _deliver_control(self) -> bool:
        if not self._control:
            return False
        to_receiver, number, frame = self._control.popleft()
        if number in self._links:
            header, body = parse_header(frame[:HEADER_BYTES]), frame[HEADER_BYTES:]
            check_body(header, body)
            sender, receiver = self._links[number]
            (receiver.book if to_receiver else sender.book).control(number, header, body)
        return True

    def _deliver_data(self) -> bool:
        for number, (sender, receiver) in self._links.items():
            frame = sender.next_frame(number)
            if frame is not None:
                receiver.take(number, frame)
                return True
        return False


class LoopbackSender:
    """A KVSender of a LoopbackNetwork."""

    def __init__(self, network: LoopbackNetwork, memory: KVMemory, fingerprint: Fingerprint, port: int) -> None:
        self.fingerprint = fingerprint
        self.address = (_HOST, port)
        self._network = network
        self._memory = memory
        self._stage = memory.stage(
            max_payload_bytes=network.options.max_frame_bytes or memory.max_frame_bytes,
            ring_bytes=network.options.ring_bytes,
        )
        self._ledger = Ledger("loopback")
        self.book = SendBook(
            memory,
            incarnation=port,
            options=network.options,
            clock=network.clock,
            ledger=self._ledger,
            wire=_LoopbackWire(network, self._stage, to_receiver=True),
        )

    def register(self, transfer_id: str, *, digest: bytes, num_tokens: int) -> None:
        transfer = transfer_key(transfer_id)
        self._ledger.begin(transfer_id)
        with self._network.lock:
            self.book.register(transfer, digest, num_tokens)
            self._network.run()

    def publish(
        self, transfer_id: str, block_table: Sequence[int], num_tokens: int, *, layer: int | None = None
    ) -> None:
        table = tuple(block_table)
        require_table(self._memory, table, num_tokens, layer)
        with self._network.lock:
            self.book.publish(transfer_key(transfer_id), table, num_tokens, layer)
            self._network.run()

    def publish_all(self, chunks: Sequence[Published], *, layer: int | None = None) -> None:
        for chunk in chunks:
            self.publish(*chunk, layer=layer)

    def rewind(self, transfer_id: str) -> None:
        with self._network.lock:
            self.book.rewind(transfer_key(transfer_id))

    def cancel(self, transfer_id: str, detail: str) -> None:
        with self._network.lock:
            self.book.cancel(transfer_key(transfer_id), Verdict("cancelled", Reason.CANCELLED, detail))
            self._network.run()

    def shed(self, transfer_ids: Sequence[str], max_blocks: int, *, unsent_too: bool) -> None:
        with self._network.lock:
            self.book.shed([transfer_key(name) for name in transfer_ids], max_blocks, unsent_too=unsent_too)
            self._network.run()

    def poll(self) -> list[TransferEnd]:
        self._network.tick()
        return self._ledger.poll()

    def set_listener(self, notify: Callable[[], None]) -> None:
        self._ledger.set_listener(notify)

    def statistics(self) -> TransferStatistics:
        with self._network.lock:
            statistics = self._ledger.statistics(self._network.num_links(self))
            return replace(statistics, pending_bytes=self.book.pending_bytes)

    def check(self) -> None:
        with self._network.lock:
            self._ledger.check()
            self.book.check()

    def close(self) -> None:
        self._ledger.close()
        with self._network.lock:
            self.book.close(Verdict("cancelled", Reason.SHUTDOWN, "This worker is shutting down."))
            self._network.unlink(self)

    def next_frame(self, connection: int) -> OutgoingFrame | None:
        """Return the next DATA frame; the network calls it."""
        frame_bytes = min(_FRAME_BYTES, self._stage.max_payload_bytes)
        taken = self.book.take(connection, frame_bytes, 0.0)
        if taken is None:
            return None
        frame = compose(*taken, self._stage, self.address[1])
        self.book.frame_sent(frame.transfer)
        return frame


class LoopbackReceiver:
    """A KVReceiver of a LoopbackNetwork."""

    def __init__(self, network: LoopbackNetwork, memory: KVMemory, fingerprint: Fingerprint) -> None:
        self.fingerprint = fingerprint
        self._network = network
        self._memory = memory
        self._stage = memory.stage(
            max_payload_bytes=network.options.max_frame_bytes or memory.max_frame_bytes,
            ring_bytes=network.options.ring_bytes,
        )
        self._ledger = Ledger("loopback")
        self._pool: dict[tuple[str, int], int] = {}
        self.book = ReceiveBook(
            memory,
            incarnation=0,
            options=network.options,
            clock=network.clock,
            ledger=self._ledger,
            wire=_LoopbackWire(network, self._stage, to_receiver=False),
            max_payload_bytes=self._stage.max_payload_bytes,
        )

    def open(self, load: LoadRequest) -> None:
        transfer_key(load.transfer_id)
        load = replace(load, block_table=tuple(load.block_table))
        require_load(self._memory, load)
        self._ledger.begin(load.transfer_id)
        with self._network.lock:
            self._open(load)
            self._network.run()

    def cancel(self, transfer_id: str, detail: str) -> None:
        with self._network.lock:
            self.book.cancel(transfer_key(transfer_id), Verdict("cancelled", Reason.CANCELLED, detail))
            self._network.run()

    def poll(self) -> list[TransferEnd]:
        self._network.tick()
        return self._ledger.poll()

    def set_listener(self, notify: Callable[[], None]) -> None:
        self._ledger.set_listener(notify)

    def statistics(self) -> TransferStatistics:
        with self._network.lock:
            statistics = self._ledger.statistics(self._network.num_links(self))
            return replace(statistics, pending_bytes=self.book.pending_bytes)

    def check(self) -> None:
        with self._network.lock:
            self._ledger.check()
            self.book.check()

    def close(self) -> None:
        self._ledger.close()
        with self._network.lock:
            self.book.close(Verdict("cancelled", Reason.SHUTDOWN, "This worker is shutting down."))
            self._network.unlink(self)

    def lost(self, connection: int, verdict: Verdict) -> None:
        """Forget a connection that is gone; the network calls it."""
        self._pool = {address: number for address, number in self._pool.items() if number != connection}
        self.book.lost(connection, verdict)

    def take(self, connection: int, frame: OutgoingFrame) -> None:
        """Copy one DATA frame to where it belongs; the network calls it."""
        head, *payload = frame.load()
        header = parse_header(head)
        place = self.book.begin_data(connection, header)
        if place is not None:
            landing = self._stage.land(header.transfer, *place)
            checksum = _scatter(payload, landing.buffers)
            self.book.data_moved(connection, header)
            self.book.end_data(connection, header, checksum, landing)
        frame.parcel.close()

    def _open(self, load: LoadRequest) -> None:
        address = (load.host, load.port)
        try:
            if address not in self._pool:
                self._pool[address] = self._network.link(self, *address)
        except (OSError, HandshakeError) as error:
            reason = Reason.HANDSHAKE if isinstance(error, HandshakeError) else Reason.PEER_LOST
            self.book.open(load, 0, connected=False)
            self.book.lost(0, Verdict("failed", reason, str(error)))
            return
        self.book.open(load, self._pool[address], connected=True)


class _LoopbackWire:
    """The books' Wire. Frames move whole, so there is never a block to let go of but by the stage."""

    def __init__(self, network: LoopbackNetwork, stage: Stage, *, to_receiver: bool) -> None:
        self._network = network
        self._stage = stage
        self._to_receiver = to_receiver

    def emit(self, connection: int, frame: bytes) -> None:
        self._network.emit(self._to_receiver, connection, frame)

    def medium(self, connection: int) -> str:
        return "loopback"

    def release(self, connection: int, transfer: bytes) -> None:
        self._stage.settle(transfer)

    def settle(self, connection: int, transfer: bytes) -> None:
        """Nothing is ever on its way."""


def _scatter(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> int:
    """Copy `sources` into `targets` and return the checksum of what arrived."""
    data = b"".join(sources)
    checksum, offset = xxh3_64(), 0
    for target in targets:
        target[:] = data[offset : offset + target.nbytes]
        offset += target.nbytes
        checksum.update(target)
    return checksum.intdigest()
