"""When is a connection as good as dead? Pure: the I/O thread asks in every tick."""

from __future__ import annotations

from tollbridge.transfer.base import Reason
from tollbridge.transfer.connection import Connection
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.tally import Verdict

_MAX_CONTROL_BACKLOG = 1024 * 1024  # bytes of control frames for a peer that does not read: it is as good as dead


def overdue(connection: Connection, options: TransferOptions, now_s: float, *, busy: bool) -> Verdict | None:
    """Return why `connection` must go, None when it may stay. `busy`: transfers use its pair."""
    name = f"{connection.peer[0]}:{connection.peer[1]}"
    if not connection.ready:
        if now_s < connection.deadline_s:
            return None
        what = "could not be reached" if connection.connecting else "did not finish the handshake"
        reason = Reason.PEER_LOST if connection.connecting else Reason.HANDSHAKE
        return Verdict("failed", reason, f"{name} {what} within {options.handshake_timeout_s:g} s.")
    if not busy:
        connection.heard_s = now_s
        return Verdict("failed", Reason.PEER_LOST, "Its keys were used up.") if connection.channel.worn else None
    if connection.waits_for_room:
        connection.heard_s = now_s
    # a little before its transfers give up, so that the dead connection goes too and the next transfer dials anew
    limit_s = 0.9 * options.progress_timeout_s
    # heartbeats come on the first lane of a pair; another may be silent, but not in the middle of a frame
    silent = (connection.is_first or connection.in_frame) and now_s - connection.heard_s > limit_s
    stuck = connection.wants_write and now_s - connection.moved_s > limit_s
    full = connection.waits_for_ring and now_s - connection.room_s > limit_s
    flooded = connection.control_backlog_bytes > _MAX_CONTROL_BACKLOG
    if silent or stuck or full or flooded:
        what = "sent nothing" if silent else "took nothing"
        return Verdict("failed", Reason.STALLED, f"{name} {what} for {limit_s:g} s.")
    return None
