"""① Reads request bodies within bounds of size, time and progress, and of all that are on their way together.

Only bytes that have arrived count: a client that announces much and sends nothing takes nothing from the others.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from tollbridge.errors import OverloadedError


class Bodies:
    """All bodies being received. `who` names the server in sentences ("router")."""

    def __init__(self, *, who: str, timeout_s: float, idle_s: float, max_bytes: int) -> None:
        """A body has `timeout_s` in all and may stand still for `idle_s`; all together hold up to `max_bytes`."""
        self._who = who
        self._timeout_s = timeout_s
        self._idle_s = idle_s
        self._max_bytes = max_bytes
        self.num_bytes = 0

    async def read(self, request: web.Request) -> bytes:
        """Return the whole body.

        Raises web.HTTPRequestEntityTooLarge (413), web.HTTPRequestTimeout (408) for one that is slow or stands still,
        OverloadedError (429) when all together are too large.
        """
        most = request.client_max_size
        if (request.content_length or 0) > most:
            raise web.HTTPRequestEntityTooLarge(max_size=most, actual_size=request.content_length or 0)
        if request.content.is_eof():  # it came along with its head, as nearly every one does: nothing to wait for
            return self._at_once(request, most)
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._timeout_s) as whole:
                while piece := await self._piece(request):
                    size += len(piece)
                    self.num_bytes += len(piece)
                    self._check(size, most, self.num_bytes)
                    pieces.append(piece)
        except TimeoutError:
            limit_s = self._timeout_s if whole.expired() else self._idle_s
            raise web.HTTPRequestTimeout(
                reason=f"The request body did not arrive: more than {limit_s:g} s were taken."
            ) from None
        finally:
            self.num_bytes -= size
        return b"".join(pieces)

    def _at_once(self, request: web.Request, most: int) -> bytes:
        body = request.content.read_nowait()
        self._check(len(body), most, self.num_bytes + len(body))
        return body

    def _check(self, size: int, most: int, num_bytes: int) -> None:
        if size > most:
            raise web.HTTPRequestEntityTooLarge(max_size=most, actual_size=size)
        if num_bytes > self._max_bytes:
            raise OverloadedError(f"The {self._who} is receiving too many request bodies: try again later.")

    async def _piece(self, request: web.Request) -> bytes:
        async with asyncio.timeout(self._idle_s):
            return await request.content.readany()
