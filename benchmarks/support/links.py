"""A TCP proxy for one worker's KV port, whose connections can be cut or slowed at any time. One event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Link:
    """Forwards to `target`. `address` is where to dial it."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.address = ("", 0)
        self.delay_s = 0.0  # of each piece
        self.num_bytes = 0
        self._writers: set[asyncio.StreamWriter] = set()

    def cut(self) -> int:
        """Reset every connection; return how many there were."""
        writers = list(self._writers)
        for writer in writers:
            writer.transport.abort()
        return len(writers) // 2

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection(*self.target)
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, there[1])
        self._writers.update(pair)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, there[1]))
                group.create_task(self._pump(there[0], writer))
        finally:
            self._writers.difference_update(pair)
            for one in pair:
                one.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await source.read(1 << 16):
                self.num_bytes += len(piece)
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                sink.write(piece)
                await sink.drain()
        sink.transport.abort()


@contextlib.asynccontextmanager
async def linked(target: tuple[str, int]) -> AsyncIterator[Link]:
    """Run a link to `target` while the context lasts."""
    link = Link(target)
    server = await asyncio.start_server(link.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    link.address = (host, port)
    try:
        yield link
    finally:
        server.close()
        link.cut()
