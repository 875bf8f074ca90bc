"""All transfers of one prefill process: every decision of the send side, without I/O. One thread at a time.

A session enters by `register` (the engine) or by OPEN (decode), whichever is first, and leaves by `_end`. Decode may
even finish with a transfer before prefill knows it (an empty range, a client that left): the verdict then waits in the
session for `register`, bounded in number and in time.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

from tollbridge.clock import Clock
from tollbridge.errors import ProtocolError
from tollbridge.transfer.base import KVMemory, Reason
from tollbridge.transfer.frames import HEADER_BYTES, Header, Kind, encode_control
from tollbridge.transfer.messages import (
    KINDS,
    Body,
    Cancel,
    Fail,
    Open,
    Ping,
    Result,
    State,
    clip,
    decode_body,
    encode_body,
)
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.session import Chunk, Opening, SendSession
from tollbridge.transfer.tally import Verdict
from tollbridge.transfer.wire import Ends, Wire

_REMEMBERED = 4096  # ended ids, so that a late OPEN is told at once


class SendBook:
    """See the top of the file. `ledger` hears of the ends, `wire` carries what must be said."""

    def __init__(
        self,
        memory: KVMemory,
        *,
        incarnation: int,
        options: TransferOptions,
        clock: Clock,
        ledger: Ends,
        wire: Wire,
    ) -> None:
        self._memory = memory
        self._incarnation = incarnation
        self._options = options
        self._clock = clock
        self._ledger = ledger
        self._wire = wire
        self._sessions: dict[bytes, SendSession] = {}
        self._by_connection: dict[int, dict[bytes, SendSession]] = {}
        self._ended: OrderedDict[bytes, Verdict] = OrderedDict()
        self._num_pending = 0  # sessions not registered

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def pending_bytes(self) -> int:
        """What decode has asked for and does not have yet. Any thread: an estimate, one reading per transfer."""
        return sum(session.remaining_bytes for session in list(self._sessions.values()) if session.opening is not None)

    # ── the engine ──

    def register(self, transfer: bytes, digest: bytes, num_tokens: int) -> int | None:
        """Announce a transfer, whose id the ledger has checked to be new; return the connection that asked for it."""
        self._ended.pop(transfer, None)
        session = self._sessions.get(transfer)
        if session is None:
            session = self._sessions[transfer] = SendSession(transfer, self._memory, self._clock)
        else:
            self._num_pending -= 1
        session.register(digest, num_tokens)
        verdict = session.mismatch()
        if verdict is not None:
            self._fail(session, verdict)
        elif session.early_verdict is not None:
            self._end(session, session.early_verdict)
        elif session.opening is not None:
            self._say_state(session)
            return session.opening.connection
        return None

    def publish(self, transfer: bytes, table: Sequence[int], num_tokens: int, layer: int | None) -> int | None:
        """Raise watermarks; return the connection that asked for the transfer."""
        session = self._sessions.get(transfer)
        if session is None or not session.registered:
            return None
        session.publish(table, num_tokens, layer)
        return session.opening.connection if session.opening is not None else None

    def rewind(self, transfer: bytes) -> None:
        """Forget what was published; the medium lets go of the blocks."""
        session = self._sessions.get(transfer)
        if session is None:
            return
        session.rewind()
        if session.opening is not None:
            self._wire.settle(session.opening.connection, transfer)

    def cancel(self, transfer: bytes, verdict: Verdict) -> None:
        """End the transfer as the engine wishes, and tell decode."""
        session = self._sessions.get(transfer)
        if session is None or not session.registered:
            return
        self._say(session, Cancel(detail=clip(verdict.detail)))
        self._end(session, verdict)

    def shed(self, transfers: Sequence[bytes], max_blocks: int, *, unsent_too: bool) -> None:
        """Fail finished sends, the newest first, until the others hold at most `max_blocks`; see KVSender."""
        sessions = [self._sessions[transfer] for transfer in reversed(transfers) if transfer in self._sessions]
        held = Counter(block for session in sessions for block in session.blocks)  # they may share a prefix
        candidates = [session for session in sessions if session.opening is None]
        if unsent_too:
            candidates += [session for session in sessions if session.opening is not None and session.untouched]
        for session in candidates:
            if len(held) <= max_blocks:
                return
            held -= Counter(session.blocks)
            detail = f"Prefill held more than {max_blocks} blocks of finished, unsent KV and gave up the newest."
            self._fail(session, Verdict("failed", Reason.PINNED_BOUND, detail))

    def close(self, verdict: Verdict) -> None:
        """End everything without a word: the connections are about to go."""
        for session in list(self._sessions.values()):
            self._end(session, verdict)

    # ── decode ──

    def control(self, connection: int, header: Header, data: bytes | bytearray) -> None:
        """Take one control frame from decode. Raises ProtocolError when it does not belong here."""
        body = decode_body(header.kind, data)
        if isinstance(body, Ping):
            return
        if isinstance(body, Open):
            self._open(connection, header, body, len(data))
            return
        session = self._sessions.get(header.transfer)
        opening = session.opening if session is not None else None
        if session is None or opening is None or (opening.connection, opening.epoch) != (connection, header.epoch):
            return  # it ended here already, or was never ours: the two sides' ends crossed on the wire
        session.tally.control(len(data))
        if isinstance(body, Cancel):
            self._conclude(session, Verdict("cancelled", Reason.PEER_CANCELLED, body.detail))
        elif isinstance(body, Result):
            self._conclude(session, _verdict(session, body))
        else:
            raise ProtocolError(f"Decode sent {Kind(header.kind).name}, which only prefill may send.")

    def lost(self, connection: int, verdict: Verdict) -> None:
        """End every transfer of a connection that is gone."""
        for session in list(self._by_connection.get(connection, {}).values()):
            self._end(session, verdict)

    # ── the medium ──

    def busy(self, connection: int) -> bool:
        """Return whether decode has open transfers there."""
        return bool(self._by_connection.get(connection))

    def has_data(self, connection: int) -> bool:
        """Return whether `take` would return a frame."""
        return any(session.has_data() for session in self._by_connection.get(connection, {}).values())

    def remaining_bytes(self, connection: int) -> int:
        """Return what is still to be sent there, published or not."""
        return sum(session.remaining_bytes for session in self._by_connection.get(connection, {}).values())

    def take(self, connection: int, max_bytes: int, goodput_bytes_per_s: float) -> tuple[SendSession, Chunk] | None:
        """Return the next frame of a connection: shortest remaining first, and age makes a transfer shorter.

        A second of age counts as the bytes that the link moves in it, so newcomers can overtake a long transfer for
        no longer than it would have taken alone: none starves.
        """
        now_s = self._clock.monotonic()
        best, best_key = None, 0.0
        for session in self._by_connection.get(connection, {}).values():
            if session.has_data():
                key = session.remaining_bytes - session.age_s(now_s) * goodput_bytes_per_s
                if best is None or key < best_key:
                    best, best_key = session, key
        if best is None:
            return None
        chunk = best.take(max_bytes)
        assert chunk is not None
        return best, chunk

    def frame_sent(self, transfer: bytes) -> None:
        """Note that the kernel took a frame's last byte."""
        session = self._sessions.get(transfer)
        if session is not None:
            session.frame_sent()

    def tick(self) -> None:
        """Send the heartbeats and end what is overdue."""
        now_s = self._clock.monotonic()
        for session in list(self._sessions.values()):
            verdict = session.overdue(self._options)
            if verdict is not None:
                self._fail(session, verdict)
            elif session.opening is not None and now_s - session.state_sent_s >= self._options.heartbeat_s:
                self._say_state(session)

    def check(self) -> None:
        """Raise AssertionError when the indexes and the sessions disagree."""
        for session in self._sessions.values():
            session.check()
        for connection, sessions in self._by_connection.items():
            assert sessions, f"connection {connection} has an empty index"
            for transfer, session in sessions.items():
                assert self._sessions[transfer] is session
                assert session.opening is not None and session.opening.connection == connection
        assert self._num_pending == sum(not session.registered for session in self._sessions.values())
        registered = {session.transfer.hex() for session in self._registered()}
        assert registered <= self._ledger.active(), "a registered session is not in the ledger"

    # ── inside ──

    def _registered(self) -> Iterator[SendSession]:
        return (session for session in self._sessions.values() if session.registered)

    def _open(self, connection: int, header: Header, body: Open, body_bytes: int) -> None:
        session = self._sessions.get(header.transfer)
        refusal = self._refusal(session, connection, header)
        if refusal is not None:
            self._refuse(connection, header, refusal)
            return
        if session is not None and session.opening is not None:
            return  # the same OPEN twice
        if session is None:
            session = self._sessions[header.transfer] = SendSession(header.transfer, self._memory, self._clock)
            self._num_pending += 1
        session.open(
            Opening(
                connection=connection,
                epoch=header.epoch,
                digest=body.digest,
                first_token=body.first_token,
                num_tokens=body.num_tokens,
                max_payload_bytes=body.max_payload_bytes,
            )
        )
        session.tally.medium = self._wire.medium(connection)
        session.tally.control(body_bytes)
        self._by_connection.setdefault(connection, {})[header.transfer] = session
        verdict = session.mismatch()
        if verdict is not None:
            self._fail(session, verdict)
        else:
            self._say_state(session)

    def _refusal(self, session: SendSession | None, connection: int, header: Header) -> Verdict | None:
        """Return why this OPEN cannot be taken."""
        if session is None:
            if header.transfer in self._ended:
                ended = self._ended[header.transfer]
                reason = Reason.PEER_CANCELLED if ended.outcome == "cancelled" else (ended.reason or Reason.PROTOCOL)
                return Verdict("failed", reason, f"Prefill had ended this transfer: {ended.detail or ended.outcome}")
            if self._num_pending >= self._options.max_pending_opens:
                return Verdict("failed", Reason.UNKNOWN, "Too many transfers wait for a prefill request.")
            return None
        opening = session.opening
        if opening is not None and (opening.connection, opening.epoch) != (connection, header.epoch):
            return Verdict("failed", Reason.PROTOCOL, f"Transfer {header.transfer_id} is already open.")
        return None

    def _refuse(self, connection: int, header: Header, verdict: Verdict) -> None:
        body = Fail(reason=verdict.reason, detail=clip(verdict.detail))
        self._emit(connection, header.transfer, header.epoch, body)

    def _conclude(self, session: SendSession, verdict: Verdict) -> None:
        """Take decode's verdict; keep it for `register` when that has not come."""
        if session.registered:
            self._end(session, verdict)
            return
        session.early_verdict = verdict
        self._unlink(session)  # decode is through with it: it must not count as open, nor end with the connection

    def _fail(self, session: SendSession, verdict: Verdict) -> None:
        self._say(session, Fail(reason=verdict.reason, detail=clip(verdict.detail)))
        self._end(session, verdict)

    def _end(self, session: SendSession, verdict: Verdict) -> None:
        """Leave the book. The blocks are let go before the engine hears of the end."""
        del self._sessions[session.transfer]
        self._unlink(session)
        if not session.registered:
            self._num_pending -= 1
            return
        self._remember(session.transfer, verdict)
        num_tokens = session.opening.num_tokens if session.opening is not None else 0
        now_s = self._clock.monotonic()
        self._ledger.end(
            session.tally.report(session.transfer.hex(), "send", verdict, num_tokens=num_tokens, now_s=now_s)
        )

    def _unlink(self, session: SendSession) -> None:
        """Part the session from its connection."""
        if session.opening is None:
            return
        connection = session.opening.connection
        self._wire.release(connection, session.transfer)
        siblings = self._by_connection.get(connection, {})
        siblings.pop(session.transfer, None)
        if not siblings:
            self._by_connection.pop(connection, None)

    def _remember(self, transfer: bytes, verdict: Verdict) -> None:
        self._ended[transfer] = verdict
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def _say_state(self, session: SendSession) -> None:
        session.state_sent_s = self._clock.monotonic()
        self._say(session, State(state=session.state, published_tokens=session.published_tokens))

    def _say(self, session: SendSession, body: Body) -> None:
        opening = session.opening
        if opening is not None:
            size = self._emit(opening.connection, session.transfer, opening.epoch, body)
            session.tally.control(size - HEADER_BYTES)

    def _emit(self, connection: int, transfer: bytes, epoch: int, body: Body) -> int:
        frame = encode_control(KINDS[type(body)], transfer, self._incarnation, epoch, encode_body(body))
        self._wire.emit(connection, frame)
        return len(frame)


def _verdict(session: SendSession, result: Result) -> Verdict:
    """Return what decode's result means here: it cannot have accepted what was not sent."""
    if result.outcome == "done" and not session.complete:
        return Verdict("failed", Reason.PROTOCOL, "Decode accepted KV that was not sent.")
    return Verdict(result.outcome, result.reason, result.detail)
