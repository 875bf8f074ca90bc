"""Sockets as this package wants them, and a wake-up for a thread that sits in `select`."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress

from tollbridge.transfer.options import TransferOptions

# Linux has all of these; elsewhere the option is skipped.
_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", None)
_USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", None)
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))  # an idle dead peer is noticed in 11 s


class Waker:
    """Wakes a selector from any thread: register `fileno()`, call `wake()` elsewhere, `clear()` when it is readable."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # a late wake must not hit a descriptor that was closed and reused

    def fileno(self) -> int:
        return self._fd

    def wake(self) -> None:
        with self._lock, suppress(BlockingIOError):  # blocking would mean that the counter is full: it is awake
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        with self._lock:
            os.close(self._fd)
            self._fd = -1


def listen(options: TransferOptions) -> socket.socket:
    """Return a non-blocking listener; OSError when the address is taken or not ours."""
    family = socket.getaddrinfo(options.bind_host, options.bind_port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((options.bind_host, options.bind_port), family=family, backlog=512)
    listener.setblocking(False)
    return listener


def tune(sock: socket.socket, options: TransferOptions) -> None:
    """Make a connection non-blocking and prompt, and let it die when its peer does."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if _USER_TIMEOUT is not None:
        sock.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, int(2000 * options.progress_timeout_s))
    if options.socket_buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, options.socket_buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options.socket_buffer_bytes)
    if options.dscp:
        _set_dscp(sock, options.dscp)


def limit_unsent(sock: socket.socket, num_bytes: int) -> None:
    """Let the kernel hold at most about `num_bytes` not yet sent: what it holds, a cancel cannot take back."""
    if _NOTSENT_LOWAT is not None:
        sock.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, num_bytes)


def _set_dscp(sock: socket.socket, dscp: int) -> None:
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, dscp << 2)
    else:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << 2)


def is_numeric(host: str, port: int) -> bool:
    """Return whether `host` needs no name resolution."""
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        return False
    return True
