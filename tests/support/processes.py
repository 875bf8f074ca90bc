"""Waiting for processes that need not be our children."""

from __future__ import annotations

import os
import select
from contextlib import suppress
from pathlib import Path


def group(leader: int) -> list[int]:
    """Return the processes in the group that `leader` leads."""
    members = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if os.getpgid(int(entry.name)) == leader:
                members.append(int(entry.name))
    return members


def wait_gone(pid: int, timeout_s: float = 60.0) -> None:
    """Return once process `pid` has ended; AssertionError when it does not in time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], timeout_s)[0], f"process {pid} is still running"
    finally:
        os.close(descriptor)
