"""Which address of this machine other workers dial for KV. A wrong one makes every split fail quietly."""

from __future__ import annotations

import ipaddress
import socket

from tollbridge.config.address import is_loopback
from tollbridge.errors import ConfigError

# Documentation addresses (RFC 5737, RFC 3849): a UDP connect to them sends nothing, and the kernel picks our address.
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


def kv_host(host: str, given: str | None) -> str:
    """Return the address to listen on for KV, for a server that takes requests on `host`; ConfigError without one.

    `given` is the user's own choice. On loopback both stay there; a server for others needs an address they can dial.
    """
    if given is not None:
        return _checked(given, host)
    if is_loopback(host):
        return host
    return routable_address() if is_wildcard(host) else host


def is_wildcard(host: str) -> bool:
    """Return whether `host` stands for every address of the machine, and so names none."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return not host


def routable_address() -> str:
    """Return the address that this machine uses towards others; ConfigError when it has none."""
    for family, elsewhere in _ELSEWHERE:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((elsewhere, 9))
                address = str(probe.getsockname()[0])
        except OSError:
            continue
        if not is_loopback(address):
            return address
    raise ConfigError("this machine has no route to any other, so no address for KV: name one with --kv-host.")


def free_port(host: str) -> int:
    """Return a port that is free on `host` now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _checked(given: str, host: str) -> str:
    if is_wildcard(given):
        raise ConfigError(f"--kv-host {given} is no address that another worker could dial: name one.")
    if is_loopback(given) and not is_loopback(host):
        raise ConfigError(
            f"--kv-host {given} reaches this machine only, but the server listens on {host}: "
            "name the address that other workers dial, or leave the flag out."
        )
    return given
