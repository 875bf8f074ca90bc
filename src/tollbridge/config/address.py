"""Network addresses as the cluster file writes them: `host:port`, `http://host:port`, `tcp://host:port`."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - where one may listen, and nobody can dial


@dataclass(frozen=True, kw_only=True)
class Address:
    """One endpoint. `host` has no brackets, also for IPv6; port 0 means "choose"."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_address(text: str, *, scheme: str = "") -> Address:
    """Return the endpoint in `text`, which must begin with `scheme`; ValueError with a clause saying what is wrong."""
    if not text.startswith(scheme):
        raise ValueError(f"must begin with {scheme}")
    host, colon, port = text.removeprefix(scheme).removesuffix("/" if scheme else "").rpartition(":")
    if not colon or not host:
        raise ValueError(f"must look like {scheme}host:port")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError("must end with a port from 0 to 65535")
    return Address(host=_bare_host(host), port=int(port))


def is_loopback(host: str) -> bool:
    """Say whether `host` names this machine to itself only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bare_host(host: str) -> str:
    if host.startswith("[") and host.endswith("]"):
        return host[1:-1]
    if ":" in host:
        raise ValueError("must put an IPv6 address in brackets")
    if any(character in host for character in "/@?# "):
        raise ValueError("must name a host and a port only")
    return host
