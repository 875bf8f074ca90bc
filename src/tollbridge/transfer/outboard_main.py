"""The I/O process of outboard.py: `python -m tollbridge.transfer.outboard_main PIPE_FD MEMORY_FD [COPIES_FD]`."""

from __future__ import annotations

import logging
import mmap
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

from tollbridge.errors import TollbridgeError
from tollbridge.obs import logs
from tollbridge.transfer.base import KVMemory
from tollbridge.transfer.copies import RemoteMemory
from tollbridge.transfer.orders import (
    Abandon,
    Answer,
    Ended,
    Inspect,
    Load,
    Pipe,
    Publish,
    Ready,
    Refused,
    Register,
    Rewind,
    Shed,
    Start,
    orders,
)
from tollbridge.transfer.shared import DeviceLayout, Layout, attach
from tollbridge.transfer.tcp import TcpReceiver, TcpSender

Side = TcpSender | TcpReceiver
Tables = dict[str, tuple[int, ...] | None]  # of active sends, as they were told last
EXIT_LOST = 70


def main(arguments: Sequence[str]) -> int:
    """Serve one side until the pipe ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they may reach the whole group, or all of a unit:
        signal.signal(number, signal.SIG_IGN)  # the engine says when to end, for it may have requests to finish
    pipe_fd, *memory_fds = map(int, arguments)
    pipe = Pipe(socket.socket(fileno=pipe_fd))
    data = pipe.receive()
    start = orders.decode(data) if data is not None else None
    if not isinstance(start, Start):
        return 0  # the engine is gone
    logs.configure(level=logging.getLevelName(start.log_level))
    try:
        side = _make(start, memory_fds)
    except TollbridgeError as error:
        pipe.send(Refused(type(error).__name__, error.message))
        return 0
    tables: Tables = {}
    side.set_listener(lambda: _report(pipe, side, tables))
    pipe.send(Ready(side.address if isinstance(side, TcpSender) else ("", 0)))
    try:
        while (data := pipe.receive()) is not None:
            _obey(pipe, side, tables, orders.decode(data))
    finally:
        side.close()
        _report(pipe, side, tables)
    return 0


def _make(start: Start, fds: Sequence[int]) -> Side:
    memory = _attach(start.layout, fds)
    os.close(fds[0])
    return (TcpSender if start.side == "send" else TcpReceiver)(memory, start.fingerprint, start.options)


def _attach(layout: Layout | DeviceLayout, fds: Sequence[int]) -> KVMemory:
    if isinstance(layout, Layout):
        return attach(fds[0], layout)
    ring = memoryview(mmap.mmap(fds[0], layout.ring_bytes))
    return RemoteMemory(layout, ring, Pipe(socket.socket(fileno=fds[1])), _give_up)


def _give_up() -> None:
    """Nobody makes the copies any more, so no transfer here can come to an end; the engine hears of it."""
    os._exit(EXIT_LOST)


def _report(pipe: Pipe, side: Side, tables: Tables) -> None:
    """Tell the engine what has ended. Any thread."""
    ends = side.poll()
    for end in ends:
        tables.pop(end.transfer_id, None)
    if ends:
        with suppress(OSError):  # the engine is gone: nobody to tell
            pipe.send(Ended(tuple(ends)))


def _obey(pipe: Pipe, side: Side, tables: Tables, order: object) -> None:
    match order, side:
        case Abandon(), _:
            side.cancel(order.transfer_id, order.detail)
        case Inspect(), _:
            pipe.send(_inspect(side, order))
        case Load(), TcpReceiver():
            side.open(order.request)
        case Register(), TcpSender():
            tables[order.transfer_id] = None
            side.register(order.transfer_id, digest=order.digest, num_tokens=order.num_tokens)
        case Publish(), TcpSender():
            _publish(side, order, tables)
        case Shed(), TcpSender():
            side.shed(order.transfer_ids, order.max_blocks, unsent_too=order.unsent_too)
        case Rewind(), TcpSender():
            side.rewind(order.transfer_id)
            pipe.send(Answer())
        case _:
            raise ValueError(f"{type(order).__name__} is no order for {type(side).__name__}")


def _publish(side: TcpSender, order: Publish, tables: Tables) -> None:
    table = order.block_table if order.block_table is not None else tables.get(order.transfer_id)
    if order.transfer_id in tables:
        tables[order.transfer_id] = table
    if table is not None:  # otherwise it has ended here, and the engine has still to hear of it
        side.publish(order.transfer_id, table, order.num_tokens, layer=order.layer)


def _inspect(side: Side, order: Inspect) -> Answer:
    broken = ""
    if order.check:
        try:
            side.check()
        except AssertionError as error:
            broken = str(error) or "an invariant of the I/O process is broken"
    statistics = side.statistics()
    return Answer(
        num_connections=statistics.num_connections,
        num_connections_by_medium=statistics.num_connections_by_medium,
        goodput_bytes_per_s=statistics.goodput_bytes_per_s,
        pending_bytes=statistics.pending_bytes,
        broken=broken,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
