"""Asking a real KV listener who it is."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from tests.transfer.harness import FINGERPRINT, SHORT, PairMaker
from tests.transfer.tls_files import make_tls
from tollbridge.errors import HandshakeError, ProtocolError
from tollbridge.transfer.channel import Tls
from tollbridge.transfer.interview import interview

SECRET = b"the cluster secret"
PATIENCE_S = 60.0


def test_the_fingerprint_comes_back_and_the_listener_goes_on(make_tcp: PairMaker) -> None:
    pair = make_tcp(replace(SHORT, secret=SECRET))
    host, port = pair.sender.address
    for _ in range(2):
        answer = interview(host, port, SECRET)
        assert answer.fingerprint == FINGERPRINT
        assert 0 < answer.connect_s < PATIENCE_S


def test_another_secret(make_tcp: PairMaker) -> None:
    host, port = make_tcp(replace(SHORT, secret=SECRET)).sender.address
    with pytest.raises(HandshakeError, match="does not know this cluster's secret"):
        interview(host, port, b"another secret")


def test_tls(make_tcp: PairMaker, tmp_path: Path) -> None:
    ca = trustme.CA()
    prefill, doctor, stranger = (
        make_tls(tmp_path, name, authority) for name, authority in (("p", ca), ("x", ca), ("s", trustme.CA()))
    )
    host, port = make_tcp(replace(SHORT, secret=SECRET, tls=prefill)).sender.address
    assert interview(host, port, SECRET, tls=Tls(doctor)).fingerprint == FINGERPRINT
    with pytest.raises(HandshakeError, match="TLS"):
        interview(host, port, SECRET, tls=Tls(stranger))
    with pytest.raises((HandshakeError, ProtocolError, OSError)):
        interview(host, port, SECRET)


def test_nobody_there() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        with pytest.raises(OSError, match="refused"):
            interview("127.0.0.1", sock.getsockname()[1], SECRET)


@contextmanager
def speaking(words: bytes) -> Iterator[int]:
    """Run a server that says `words` to whoever connects, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(words)

        thread = threading.Thread(target=serve)
        thread.start()
        yield int(server.getsockname()[1])
        thread.join(PATIENCE_S)


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" + b" " * 64, ProtocolError, "does not speak the KV protocol"),
        (b"", HandshakeError, "without a word"),
        (b"TB", ProtocolError, "in the middle"),
    ],
)
def test_something_else_there(words: bytes, kind: type[Exception], said: str) -> None:
    with speaking(words) as port, pytest.raises(kind, match=said):
        interview("127.0.0.1", port, SECRET)
