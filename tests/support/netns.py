"""What crossed a link between two hosts made of network namespaces."""

from __future__ import annotations

from tollbridge.bench.netns import Link


def sent_bytes(link: Link, host: str) -> int:
    """Return how many bytes the host has put on the link. Call it on that host."""
    device = f"{link.name}v{host}:"
    with open("/proc/thread-self/net/dev", encoding="ascii") as file:
        for line in file:
            if line.strip().startswith(device):
                return int(line.split()[9])
    raise LookupError(f"there is no device {device}")
