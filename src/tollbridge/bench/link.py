"""What plain sockets carry from where prefill runs to where decode runs, in a moment."""

from __future__ import annotations

import asyncio
import socket
from contextlib import nullcontext

from tollbridge.bench.netns import ADDRESSES, Link, on_host
from tollbridge.probe.link_raw import RawFlow

SECONDS = 0.6
_LOOPBACK = "127.0.0.1"


async def raw_goodput(link: Link | None = None, seconds: float = SECONDS) -> float:
    """Return bytes/s of one TCP stream from host a to host b of `link`, or over loopback."""
    return await asyncio.to_thread(_measure, link, seconds)


def _measure(link: Link | None, seconds: float) -> float:
    with on_host(link, "b") if link else nullcontext():
        listener = socket.create_server((ADDRESSES["b"] if link else _LOOPBACK, 0))
    with listener, on_host(link, "a") if link else nullcontext():
        sender = socket.create_connection(listener.getsockname()[:2], timeout=10)
        receiver, _ = listener.accept()
    sending = RawFlow([sender], sends=True, seconds=seconds)
    rate = RawFlow([receiver], sends=False, seconds=seconds).wait()
    sending.wait()
    return rate.bytes_per_s
