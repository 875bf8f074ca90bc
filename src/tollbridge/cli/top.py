"""`tollbridge top`: the dashboard's snapshot in the terminal, from the same endpoint."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import aiohttp
import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.live import Live

from tollbridge.cli.chat import API_KEY_VARIABLE
from tollbridge.cli.top_view import screen
from tollbridge.errors import AuthenticationError, RequestError, UnavailableError, UpstreamError
from tollbridge.ui.snapshot import Snapshot

_CONNECT_S = 5.0
_LONGEST_LINE = 1 << 22
_WIDTH = 140  # of a screen that goes into a file
_SILENCE_S = 10.0  # the router speaks twice a second
_PAUSE_S = 1.0  # before a router that has gone is tried again
_PATIENCE_S = 30.0  # and for how long


def top(
    *,
    url: Annotated[str, Parameter(help="Where the router is.")] = "http://127.0.0.1:8000",
    json: Annotated[bool, Parameter(negative=(), show_default=False, help="Print one snapshot and end.")] = False,
    once: Annotated[bool, Parameter(negative=(), show_default=False, help="Print one screen and end.")] = False,
) -> int:
    """Watch a router until Ctrl-C. A router that wants a key reads it from TOLLBRIDGE_API_KEY."""
    base = url.rstrip("/").removesuffix("/v1").removesuffix("/ui")
    if json or once or not sys.stdout.isatty():
        body = asyncio.run(_fetch(base))
        if json:
            print(body.decode())
        else:
            Console(width=None if sys.stdout.isatty() else _WIDTH).print(screen(decode(body)))
        return 0
    asyncio.run(_watch(base))
    return 0


async def _watch(base: str) -> None:
    """Show each snapshot; wait for a router that has gone, but not for ever."""
    lost_s: float | None = None
    with Live(screen=True, auto_refresh=False) as live:
        while True:
            try:
                async for body in _follow(base):
                    lost_s = None
                    live.update(screen(decode(body)), refresh=True)
            except UnavailableError:
                lost_s = time.monotonic() if lost_s is None else lost_s
                if time.monotonic() - lost_s > _PATIENCE_S:
                    raise
            await asyncio.sleep(_PAUSE_S)


def decode(body: bytes) -> Snapshot:
    """Return the snapshot; UpstreamError when this is no router of ours, or of another version."""
    try:
        return msgspec.json.decode(body, type=Snapshot)
    except msgspec.DecodeError as error:
        raise UpstreamError(f"What answered is no router of this version: {error}.") from None


async def _fetch(base: str) -> bytes:
    async with _asked(base, "/ui/snapshot") as response:
        return await response.read()


async def _follow(base: str) -> AsyncIterator[bytes]:
    async with _asked(base, "/ui/events") as response:
        is_snapshot = False
        async for line in response.content:
            if line.startswith(b"event: "):
                is_snapshot = line.strip() == b"event: snapshot"
            elif is_snapshot and line.startswith(b"data: "):
                yield line[6:]


@asynccontextmanager
async def _asked(base: str, path: str) -> AsyncIterator[aiohttp.ClientResponse]:
    """GET `path` with the key; what goes wrong is one of our errors."""
    url = base + path
    key = os.environ.get(API_KEY_VARIABLE)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, read_bufsize=_LONGEST_LINE) as session,
            session.get(url, headers=headers) as response,
        ):
            _check(response, url)
            yield response
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
        raise RequestError(f"{base!r} is no URL: write it like http://127.0.0.1:8000.") from None
    except aiohttp.ClientConnectorError:
        raise UnavailableError(f"Nobody answers at {base}: is the router running?") from None
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UnavailableError(f"{base} broke off ({type(error).__name__}): is it a router, and running?") from None


def _check(response: aiohttp.ClientResponse, url: str) -> None:
    if response.status == 401:
        raise AuthenticationError(f"The router wants an API key: set {API_KEY_VARIABLE}.")
    if response.status == 404:
        raise UpstreamError(f"There is no dashboard at {url}: an older router, or none of ours.")
    if response.status != 200:
        raise UnavailableError(f"{url} answered {response.status}.")
