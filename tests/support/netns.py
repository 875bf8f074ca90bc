"""Puts the two ends of a transfer on two hosts: network namespaces, entered by thread, and what crossed the link."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

from tollbridge.bench.netns import Link

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def on_host(link: Link, host: str) -> Iterator[None]:
    """Let this thread, and the threads that it starts, make their sockets on host a or b."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{link.name}{host}", os.O_RDONLY)
    try:
        _enter(there)
        yield
    finally:
        _enter(home)
        os.close(there)
        os.close(home)


def sent_bytes(link: Link, host: str) -> int:
    """Return how many bytes the host has put on the link. Call it on that host."""
    device = f"{link.name}v{host}:"
    with open("/proc/thread-self/net/dev", encoding="ascii") as file:
        for line in file:
            if line.strip().startswith(device):
                return int(line.split()[9])
    raise LookupError(f"there is no device {device}")


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
