"""A TCP proxy before a server that dies: it passes bytes until told to cut, then resets everything and refuses."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER that lets close() send a reset


class CutProxy:
    """Cuts itself once `events` server-sent events of one answer have passed; None: not by itself."""

    def __init__(self, host: str, port: int, *, events: int | None = None) -> None:
        self._target = (host, port)
        self._events = events
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.url = ""
        self.is_cut = False

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def cut(self) -> None:
        """Reset every connection and refuse new ones: what its clients see of a killed server."""
        self.is_cut = True
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, out = await asyncio.open_connection(*self._target)
        self._writers |= {writer, out}
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass(reader, out))
                both.create_task(self._pass(back, writer, watched=True))
        except* (ConnectionError, OSError):
            pass
        finally:
            for each in (writer, out):
                self._writers.discard(each)
                with suppress(ConnectionError, OSError):
                    each.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, watched: bool = False) -> None:
        passed = 0
        while piece := await reader.read(1 << 16):
            if watched and self._events is not None:
                cut_at = _end_of_event(piece, self._events - passed)
                passed += piece.count(b"data: ")
                if cut_at is not None:
                    writer.write(piece[:cut_at])
                    await writer.drain()
                    await asyncio.sleep(0.2)  # a reset overtakes what is on its way
                    await self.cut()
                    return
            writer.write(piece)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


def _end_of_event(piece: bytes, number: int) -> int | None:
    """Return where the event `number` of `piece` begins, None when it has fewer."""
    at = -1
    for _ in range(number + 1):
        at = piece.find(b"data: ", at + 1)
        if at < 0:
            return None
    return at


@asynccontextmanager
async def cut_proxy(host: str, port: int, *, events: int | None = None) -> AsyncIterator[CutProxy]:
    proxy = CutProxy(host, port, events=events)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.cut()
