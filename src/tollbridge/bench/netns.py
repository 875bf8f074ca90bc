"""Two hosts joined by a link: network namespaces and a veth pair, shaped with `tc tbf`. Needs root and iproute2.

The names carry the process id, so two runs never meet, and what a killed run left behind is removed by the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from tollbridge.errors import TollbridgeError

ADDRESSES = {"a": "10.99.0.1", "b": "10.99.0.2"}
_CLONE_NEWNET = 0x40000000
_counter = itertools.count()


class LinkUnavailableError(TollbridgeError):
    """This machine cannot make the link; the message says what is missing and how to get it."""


class Link:
    """A link that is up, unshaped until `shape` says otherwise."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rate = "none"

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """Return the command that runs `argv` on host a or b."""
        return ["ip", "netns", "exec", self.name + host, *argv]

    def shape(self, rate: str | None, *, burst: str = "1mb", latency: str = "20ms") -> None:
        """Let both directions carry `rate` (as tc writes it, `1gbit`); None: as fast as the machine goes."""
        for host in ADDRESSES:
            device = ["dev", f"{self.name}v{host}", "root"]
            qdisc = self.command(host, ["tc", "qdisc"])
            if rate is not None:
                _do(*qdisc, "replace", *device, "tbf", "rate", rate, "burst", burst, "latency", latency)
            elif self.rate != "none":
                _do(*qdisc, "del", *device)
        self.rate = rate or "none"


@contextlib.contextmanager
def on_host(link: Link, host: str) -> Iterator[None]:
    """Let this thread, and the threads and processes that it starts, make their sockets on host a or b."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{link.name}{host}", os.O_RDONLY)
    try:
        _enter(libc, there)
        yield
    finally:
        _enter(libc, home)
        os.close(home)
        os.close(there)


def _enter(libc: ctypes.CDLL, namespace: int) -> None:
    if libc.setns(namespace, _CLONE_NEWNET):
        raise LinkUnavailableError(f"setns failed: {os.strerror(ctypes.get_errno())}.")


@contextlib.contextmanager
def link(rate: str | None = None) -> Iterator[Link]:
    """Bring up a link, and remove it however the block ends (SIGTERM included).

    Raises LinkUnavailableError, with what to do, without root or iproute2.
    """
    _require()
    _sweep()
    made = Link(f"tb{os.getpid()}n{next(_counter)}")
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        _build(made.name)
        if rate is not None:
            made.shape(rate)
        yield made
    finally:
        signal.signal(signal.SIGTERM, previous)
        _remove(made.name)


def _require() -> None:
    if os.geteuid() != 0:
        raise LinkUnavailableError("Network namespaces need root: run it with sudo, or in a container.")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise LinkUnavailableError(f"The command `{tool}` is missing: apt-get install iproute2.")


def _build(name: str) -> None:
    try:
        for host in ADDRESSES:
            _do("ip", "netns", "add", name + host)
            _do("ip", "-n", name + host, "link", "set", "lo", "up")
        _do("ip", "link", "add", f"{name}va", "type", "veth", "peer", "name", f"{name}vb")
        for host, address in ADDRESSES.items():
            device = f"{name}v{host}"
            _do("ip", "link", "set", device, "netns", name + host)
            _do("ip", "-n", name + host, "addr", "add", f"{address}/24", "dev", device)
            _do("ip", "-n", name + host, "link", "set", device, "up")
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "").strip()
        raise LinkUnavailableError(
            f"`{' '.join(error.cmd)}` failed ({said}): this container may lack CAP_NET_ADMIN or CAP_SYS_ADMIN."
        ) from None


def _remove(name: str) -> None:
    for host in ADDRESSES:
        subprocess.run(["ip", "netns", "del", name + host], capture_output=True, check=False)
    subprocess.run(["ip", "link", "del", f"{name}va"], capture_output=True, check=False)  # had it not been moved yet


def _sweep() -> None:
    """Remove the links of runs that were killed."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    found = {match[1]: int(match[2]) for match in re.finditer(r"^(tb(\d+)n\d+)[ab]\b", listed, re.MULTILINE)}
    for name, pid in found.items():
        if not Path(f"/proc/{pid}").exists():
            _remove(name)


def _terminate(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)


def _do(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, text=True)
