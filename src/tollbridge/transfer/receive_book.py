"""All transfers of one decode process: every decision of the receive side, without I/O. One thread at a time.

A session enters by `open` and leaves by `_end`. What arrives for a transfer that is not (or no longer) in the book is
drained by the medium into scratch memory, so nothing can be written into a block after the end.
"""

from __future__ import annotations

from tollbridge.clock import Clock
from tollbridge.errors import ProtocolError
from tollbridge.transfer.base import KVMemory, LoadRequest, Reason
from tollbridge.transfer.frames import HEADER_BYTES, MAX_PAYLOAD_BYTES, NO_TRANSFER, Header, Kind, encode_control
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
from tollbridge.transfer.session import ReceiveSession
from tollbridge.transfer.stage import PASSED, Fence, Landing, Span
from tollbridge.transfer.tally import Verdict
from tollbridge.transfer.wire import Ends, Wire


class ReceiveBook:
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
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        self._memory = memory
        self._incarnation = incarnation
        self._options = options
        self._clock = clock
        self._ledger = ledger
        self._wire = wire
        self._max_payload_bytes = max_payload_bytes
        self._sessions: dict[bytes, ReceiveSession] = {}
        self._by_connection: dict[int, dict[bytes, ReceiveSession]] = {}
        self._pinged_s: dict[int, float] = {}
        self._farewells: dict[int, list[ReceiveSession]] = {}  # cancelled before their connection was up
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def pending_bytes(self) -> int:
        """What has not arrived yet. Any thread: an estimate, one reading per transfer."""
        return sum(session.remaining_bytes for session in list(self._sessions.values()))

    # ── the engine ──

    def open(self, load: LoadRequest, connection: int, *, connected: bool, fence: Fence = PASSED) -> None:
        """Enter a transfer on a connection, and ask at once when that is `connected`.

        Its blocks are free to be written once `fence` is behind us.
        """
        self._epoch = (self._epoch + 1) % 2**32
        session = ReceiveSession(
            load,
            connection,
            self._epoch,
            self._memory,
            self._clock,
            fence,
            max_payload_bytes=self._max_payload_bytes,
        )
        self._sessions[session.transfer] = session
        self._by_connection.setdefault(connection, {})[session.transfer] = session
        if connected:
            self._ask(session)

    def cancel(self, transfer: bytes, verdict: Verdict) -> None:
        """End the transfer as the engine wishes, and tell prefill."""
        session = self._sessions.get(transfer)
        if session is None:
            return
        if not session.asked:  # prefill shall hear of it all the same, and not hold its blocks until it loses patience
            self._farewells.setdefault(session.connection, []).append(session)
        self._say(session, Cancel(detail=clip(verdict.detail)))
        self._end(session, verdict)

    def close(self, verdict: Verdict) -> None:
        """End everything without a word: the connections are about to go."""
        for session in list(self._sessions.values()):
            self._end(session, verdict)

    # ── prefill ──

    def connected(self, connection: int) -> None:
        """Ask for everything that waited for this connection."""
        for session in self._farewells.pop(connection, []):
            session.ask()
            self._say_open(session)
            self._say(session, Cancel(detail="Decode cancelled before it was connected."))
        for session in list(self._by_connection.get(connection, {}).values()):
            self._ask(session)

    def lost(self, connection: int, verdict: Verdict) -> None:
        """End every transfer of a connection that is gone."""
        for session in list(self._by_connection.get(connection, {}).values()):
            self._end(session, verdict)

    def control(self, connection: int, header: Header, data: bytes | bytearray) -> None:
        """Take one control frame from prefill. Raises ProtocolError when it does not belong here."""
        body = decode_body(header.kind, data)
        session = self._session(connection, header)
        if session is None:
            return  # it ended here already: the two sides' ends crossed on the wire
        session.tally.control(len(data))
        if isinstance(body, State):
            session.heard(body.state)
        elif isinstance(body, Fail):
            self._end(session, Verdict("failed", body.reason, body.detail))
        elif isinstance(body, Cancel):
            detail = f"Prefill cancelled the transfer: {body.detail}"
            self._end(session, Verdict("failed", Reason.PEER_CANCELLED, detail))
        else:
            raise ProtocolError(f"Prefill sent {Kind(header.kind).name}, which only decode may send.")

    def begin_data(self, connection: int, header: Header) -> tuple[Span, Fence] | None:
        """Return where a DATA payload goes and what must be over before; None when it must be drained.

        A frame that does not fit its transfer fails that transfer; its bytes are drained and the others go on.
        """
        session = self._session(connection, header)
        if session is None:
            return None
        session.tally.frame(header.payload_bytes)
        try:
            span = session.begin(header)
        except ProtocolError as error:
            self._fail(session, Verdict("failed", Reason.PROTOCOL, error.message))
            return None
        return (span, session.fence) if span is not None else None

    def data_moved(self, connection: int, header: Header) -> None:
        """Note that payload bytes of this frame arrived. Any thread at any time: all it does is to note times."""
        session = self._session(connection, header)
        if session is not None:
            session.moved()

    def end_data(self, connection: int, header: Header, checksum: int, landing: Landing) -> None:
        """Take a frame whose payload, with this checksum, is in `landing`, and commit that or close it."""
        session = self._session(connection, header)
        if session is None:
            landing.close()
            return
        if checksum != header.payload_checksum:
            landing.close()
            end = header.first_token + header.num_tokens
            detail = f"KV of layer {header.layer}, tokens {header.first_token}..{end} arrived damaged."
            self._fail(session, Verdict("failed", Reason.CHECKSUM, detail))
            return
        landing.commit()
        session.arrived(header)
        self._maybe_done(session)

    # ── the medium ──

    def busy(self, connection: int) -> bool:
        """Return whether a transfer waits for or uses this connection."""
        return bool(self._by_connection.get(connection))

    def tick(self) -> None:
        """Send the heartbeats and end what is overdue."""
        for session in list(self._sessions.values()):
            verdict = session.overdue(self._options)
            if verdict is not None:
                self._fail(session, verdict)
        now_s = self._clock.monotonic()
        for connection, sessions in self._by_connection.items():
            due = now_s - self._pinged_s.get(connection, 0.0) >= self._options.heartbeat_s
            if due and any(session.asked for session in sessions.values()):
                self._pinged_s[connection] = now_s
                self._emit(connection, NO_TRANSFER, 0, Ping())

    def forget(self, connection: int) -> None:
        """Drop what is kept about a connection that is gone and has no transfers left."""
        self._farewells.pop(connection, None)
        self._pinged_s.pop(connection, None)

    def check(self) -> None:
        """Raise AssertionError when the indexes and the sessions disagree."""
        for session in self._sessions.values():
            session.check()
        for connection, sessions in self._by_connection.items():
            assert sessions, f"connection {connection} has an empty index"
            for transfer, session in sessions.items():
                assert self._sessions[transfer] is session and session.connection == connection
        active = {session.load.transfer_id for session in self._sessions.values()}
        assert active <= self._ledger.active(), "a session is not in the ledger"

    # ── inside ──

    def _session(self, connection: int, header: Header) -> ReceiveSession | None:
        session = self._sessions.get(header.transfer)
        if session is None or session.connection != connection or session.epoch != header.epoch:
            return None
        return session

    def _ask(self, session: ReceiveSession) -> None:
        session.tally.medium = self._wire.medium(session.connection)
        session.ask()
        self._say_open(session)
        self._maybe_done(session)

    def _say_open(self, session: ReceiveSession) -> None:
        load = session.load
        self._say(
            session,
            Open(
                digest=load.digest,
                first_token=load.first_token,
                num_tokens=load.num_tokens,
                max_payload_bytes=self._max_payload_bytes,
            ),
        )

    def _maybe_done(self, session: ReceiveSession) -> None:
        if session.complete:
            self._say(session, Result(outcome="done"))
            self._end(session, Verdict("done"))

    def _fail(self, session: ReceiveSession, verdict: Verdict) -> None:
        self._say(session, Result(outcome="failed", reason=verdict.reason, detail=clip(verdict.detail)))
        self._end(session, verdict)

    def _end(self, session: ReceiveSession, verdict: Verdict) -> None:
        """Leave the book. The medium stops writing into the blocks before the engine hears of the end."""
        self._wire.release(session.connection, session.transfer)
        del self._sessions[session.transfer]
        siblings = self._by_connection[session.connection]
        del siblings[session.transfer]
        if not siblings:
            del self._by_connection[session.connection]
        load = session.load
        now_s = self._clock.monotonic()
        self._ledger.end(
            session.tally.report(load.transfer_id, "receive", verdict, num_tokens=load.num_tokens, now_s=now_s)
        )

    def _say(self, session: ReceiveSession, body: Body) -> None:
        if session.asked:  # otherwise prefill has never heard of it
            size = self._emit(session.connection, session.transfer, session.epoch, body)
            session.tally.control(size - HEADER_BYTES)

    def _emit(self, connection: int, transfer: bytes, epoch: int, body: Body) -> int:
        frame = encode_control(KINDS[type(body)], transfer, self._incarnation, epoch, encode_body(body))
        self._wire.emit(connection, frame)
        return len(frame)
