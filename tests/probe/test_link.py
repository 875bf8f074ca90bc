"""A link probe: what strangers get, one at a time, and on a shaped link the rate that tc gives it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.timing import TRIES
from tollbridge.bench.netns import ADDRESSES, Link, LinkUnavailableError, link
from tollbridge.config.address import Address
from tollbridge.config.calibration import read_calibration
from tollbridge.errors import ConfigError, HandshakeError, StartupError, UnavailableError
from tollbridge.probe.link import LinkEffort, LinkProbe
from tollbridge.probe.link_server import LinkServer, require_secret
from tollbridge.probe.link_wire import MAGIC

SECRET = b"a secret for tests only"
BRIEF = LinkEffort(streams=(1, 2), seconds=0.2)
RATE_BYTES_PER_S = 200e6 / 8
PAYLOAD = 1448 / 1514  # of what tc counts: headers of Ethernet, IP and TCP with timestamps


@contextmanager
def serving(secret: bytes = SECRET, host: str = "127.0.0.1") -> Iterator[Address]:
    server = LinkServer(host, 0, secret)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server.address
    finally:
        server.close()
        thread.join(60)
        assert not thread.is_alive()


def heard(sock: socket.socket) -> bytes:
    """Return what comes before the end, however it ends."""
    sock.settimeout(60)
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(100):
            data += piece
    return data


def probing(there: Address, secret: bytes = SECRET) -> LinkProbe:
    return LinkProbe(there, secret, effort=BRIEF, tell=lambda *_: None)


def test_a_wrong_secret_is_told_in_one_sentence() -> None:
    with serving() as there, pytest.raises(HandshakeError, match="do not have the same secret: set one TOLLBRIDGE_SEC"):
        probing(there, b"another secret for tests")


def test_strangers_learn_nothing_and_the_server_goes_on() -> None:
    with serving() as there:
        with socket.create_connection((there.host, there.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n" + b"x" * 64)
            assert heard(stranger) == b""
        with socket.create_connection((there.host, there.port)) as stranger:
            stranger.sendall(MAGIC + bytes(32) + bytes(32))
            assert stranger.recv(len(MAGIC)) == MAGIC
            assert len(heard(stranger)) <= 32, "a nonce, and no proof"
        with probing(there):
            pass


def test_one_prober_at_a_time() -> None:
    with serving() as there, probing(there), pytest.raises(UnavailableError, match="is serving another prober"):
        probing(there)


def test_other_servers_and_none_are_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        there = Address(host="127.0.0.1", port=other.getsockname()[1])

        def answer() -> None:
            peer, _ = other.accept()
            with peer:
                peer.sendall(b"SSH-2.0-something that is longer than a nonce and its magic would be\r\n")
                peer.recv(1000)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(HandshakeError, match="is no `tollbridge probe link serve`"):
            probing(there)
        thread.join()
    with pytest.raises(UnavailableError, match=r"Nobody answers at 127\.0\.0\.1:.* run `tollbridge probe link serve`"):
        probing(there)


@pytest.mark.parametrize("host", ["10.0.0.1", "gpu-7"])
def test_between_hosts_there_must_be_a_secret(host: str) -> None:
    with pytest.raises(ConfigError, match="needs the cluster secret: set TOLLBRIDGE_SECRET"):
        require_secret(host, b"")
    require_secret(host, SECRET)
    require_secret("127.0.0.1", b"")


def test_all_is_measured_on_loopback_without_a_secret() -> None:
    for _ in range(TRIES):  # a busy machine may hold one sample up
        with serving(b"") as there, probing(there, b"") as probe:
            report = probe.run()
        if all(sample.bytes_per_s > 1e6 for sample in report.samples):
            break
    assert report.notes == []
    cases = {(s.way, s.how, s.streams, s.loaded) for s in report.samples}
    assert cases == {
        (way, how, streams, loaded)
        for way in ("up", "down")
        for how in ("raw", "transfer")
        for streams, loaded in ((1, False), (2, False), (1 if how == "raw" else 2, True))
    }
    assert all(sample.bytes_per_s > 1e6 for sample in report.samples)
    assert 0 < report.rtt_s < 5.0


@pytest.fixture(scope="module")
def shaped() -> Iterator[Link]:
    try:
        with link("200mbit") as made:
            yield made
    except LinkUnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_on_a_shaped_link_goodput_is_its_rate_both_ways(shaped: Link, tmp_path: Path) -> None:
    """The command itself on both hosts, into one file."""
    out = tmp_path / "calibration.json"
    environment = {**os.environ, "TOLLBRIDGE_SECRET": SECRET.decode()}
    command = [sys.executable, "-m", "tollbridge", "probe", "link"]
    server = subprocess.Popen(
        shaped.command("b", [*command, "serve", "--bind", f"{ADDRESSES['b']}:0"]),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    try:
        assert server.stdout is not None
        address = json.loads(server.stdout.readline())["address"]
        given = [address, "--streams", "1,4", "--from", "a", "--to", "b", "--out", str(out), "--json", "--quick"]
        done = subprocess.run(shaped.command("a", [*command, *given]), env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    finally:
        server.terminate()
        assert server.wait(60) == 0
        server.stdout.close()
    links = read_calibration(out).links
    assert set(links) == {"a>b", "b>a"}
    for found in links.values():
        assert found.goodput_bytes_per_s == pytest.approx(PAYLOAD * RATE_BYTES_PER_S, rel=0.1)
        assert found.raw_bytes_per_s == pytest.approx(PAYLOAD * RATE_BYTES_PER_S, rel=0.1)
        assert found.streams == 4
    report = json.loads(done.stdout)
    assert all(": the network is " in sentence for sentence in report["verdicts"])
    loaded = [s["bytes_per_s"] for s in report["report"]["samples"] if s["loaded"] and s["how"] == "raw"]
    assert all(rate < 0.75 * RATE_BYTES_PER_S for rate in loaded), "a second flow takes its share"
    assert min(report["report"]["rtt_loaded_s"].values()) > report["report"]["rtt_s"]


def test_a_port_that_is_taken() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(StartupError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address already in use"),
    ):
        LinkServer("127.0.0.1", taken.getsockname()[1], b"")
