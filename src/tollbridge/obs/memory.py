"""How much memory this process holds, and how much it may: read from the kernel, 0 where it does not say."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def rss_bytes() -> int:
    """Return the resident set of this process."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


@cache
def limit_bytes() -> int:
    """Return the smaller of the machine's memory and the control group's limit."""
    machine = os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES
    return min([machine, *(limit for path in _LIMITS if (limit := _number(path)))])


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max": no limit
        return 0
