"""The rival of every goodput claim: one TCP stream of a plain Python socket, `sendall` and `recv_into` of 1 MiB.

The receiver asks with one byte and measures until the last byte is in its memory; `streams` > 1 is the same with a
thread per connection. Source and destination are the caches themselves, as for the transfer it is compared with.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

PIECE_BYTES = 1024 * 1024


class RawSource:
    """Listens, and answers each one-byte question with its share of a buffer."""

    def __init__(self, host: str) -> None:
        self._listener = socket.create_server((host, 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._peers: list[socket.socket] = []

    def accept(self, streams: int) -> None:
        """Take `streams` connections in place of those of before."""
        close_all(self._peers)
        self._peers = [_tuned(self._listener.accept()[0]) for _ in range(streams)]

    def send(self, data: memoryview) -> None:
        """Send `data` once, split evenly over the connections."""
        _each(self._peers, data, _send)


class RawSink:
    """Dials a RawSource."""

    def __init__(self) -> None:
        self._peers: list[socket.socket] = []

    def connect(self, host: str, port: int, streams: int) -> None:
        close_all(self._peers)
        self._peers = [_tuned(socket.create_connection((host, port), timeout=30)) for _ in range(streams)]
        for peer in self._peers:
            peer.settimeout(None)

    def receive(self, data: memoryview) -> float:
        """Fill `data` once; return the seconds from the question to the last byte."""
        begun_s = time.monotonic()
        _each(self._peers, data, _receive)
        return time.monotonic() - begun_s


def close_all(peers: Sequence[socket.socket]) -> None:
    for peer in peers:
        peer.close()


def _tuned(peer: socket.socket) -> socket.socket:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer


def _each(
    peers: Sequence[socket.socket], data: memoryview, action: Callable[[socket.socket, memoryview], None]
) -> None:
    share = -(-len(data) // len(peers))
    parts = [data[index * share : (index + 1) * share] for index in range(len(peers))]
    if len(peers) == 1:
        action(peers[0], data)
        return
    threads = [threading.Thread(target=partial(action, peer, part)) for peer, part in zip(peers, parts, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _send(peer: socket.socket, data: memoryview) -> None:
    if not peer.recv(1):
        raise ConnectionError("the raw peer left")
    for offset in range(0, len(data), PIECE_BYTES):
        peer.sendall(data[offset : offset + PIECE_BYTES])


def _receive(peer: socket.socket, data: memoryview) -> None:
    peer.sendall(b"?")
    offset = 0
    while offset < len(data):
        received = peer.recv_into(data[offset : offset + PIECE_BYTES])
        if not received:
            raise ConnectionError("the raw peer left")
        offset += received
