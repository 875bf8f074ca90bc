"""Mutual TLS on the KV connection: who gets in, what somebody in the path can do, and that nobody speaks plain."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trustme

from tests.transfer.harness import DIGEST, FINGERPRINT, NUM_LAYERS, PATIENT, WAIT_S, Cache, Pair, PairMaker, new_id
from tests.transfer.tls_files import make_tls
from tollbridge.errors import ConfigError
from tollbridge.transfer.base import Reason, TransferEnd
from tollbridge.transfer.channel import RECORD_BYTES, Tls, TlsChannel, TlsFiles, _front
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.tcp import TcpReceiver, TcpSender

SECRET = b"the cluster secret"
TABLE = list(range(64))
NUM_TOKENS = 1000


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def files(ca: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> tuple[TlsFiles, TlsFiles]:
    """Prefill's and decode's."""
    folder = tmp_path_factory.mktemp("tls")
    return make_tls(folder, "p0", ca), make_tls(folder, "d0", ca)


@pytest.fixture
def make_tls_pair(make_tcp: PairMaker, files: tuple[TlsFiles, TlsFiles]) -> PairMaker:
    def build(
        options: TransferOptions = PATIENT, *, prefill: TlsFiles | None = files[0], decode: TlsFiles | None = files[1]
    ) -> Pair:
        options = replace(options, secret=SECRET)
        return make_tcp(replace(options, tls=prefill), receive_options=replace(options, tls=decode), token_bytes=1024)

    return build


def transfer(pair: Pair, address: tuple[str, int] | None = None, transfer_id: str | None = None) -> TransferEnd:
    """Run one transfer to its end on decode's side; what is done must be right."""
    transfer_id = transfer_id or new_id()
    host, port = address or pair.sender.address
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=NUM_TOKENS)
    pair.sender.publish(transfer_id, TABLE, NUM_TOKENS)
    pair.receiver.open(replace(pair.load(transfer_id, TABLE, NUM_TOKENS), host=host, port=port))
    end = pair.received.wait(transfer_id)
    if end.outcome == "done":
        expected = pair.send_cache.tokens(TABLE, 0, NUM_TOKENS)
        assert np.array_equal(pair.receive_cache.tokens(TABLE, 0, NUM_TOKENS), expected)
    return end


def test_transfers_over_tls(make_tls_pair: PairMaker) -> None:
    pair = make_tls_pair()
    assert [transfer(pair).outcome for _ in range(3)] == ["done"] * 3
    assert pair.receiver.statistics().num_connections == 1


def test_scattered_blocks_of_odd_sizes(make_tcp: PairMaker, files: tuple[TlsFiles, TlsFiles]) -> None:
    """Buffers smaller than a record, and such that straddle two."""
    for token_bytes in (96, 1500):
        options = TransferOptions(tls=files[0])
        pair = make_tcp(options, receive_options=replace(options, tls=files[1]), token_bytes=token_bytes)
        transfer_id, scattered = new_id(), TABLE[::2] + TABLE[1::2]
        pair.sender.register(transfer_id, digest=DIGEST, num_tokens=NUM_TOKENS)
        pair.sender.publish(transfer_id, scattered, NUM_TOKENS)
        pair.receiver.open(pair.load(transfer_id, TABLE[::-1], NUM_TOKENS))
        assert [end.outcome for end in pair.ends(transfer_id)] == ["done", "done"]
        sent = pair.send_cache.tokens(scattered, 0, NUM_TOKENS)
        assert np.array_equal(sent, pair.receive_cache.tokens(TABLE[::-1], 0, NUM_TOKENS))


# ── who gets in ──


def test_a_certificate_of_another_ca_opens_nothing(make_tls_pair: PairMaker, ca: trustme.CA, tmp_path: Path) -> None:
    stranger = make_tls(tmp_path, "x", trustme.CA(), trusts=ca)
    pair = make_tls_pair(decode=stranger)
    end = transfer(pair)
    assert (end.outcome, end.reason) == ("failed", Reason.HANDSHAKE)
    assert "transfer.tls" in end.detail
    assert transfer(make_tls_pair(prefill=stranger)).reason == Reason.HANDSHAKE


def test_no_certificate_opens_nothing(make_tls_pair: PairMaker, files: tuple[TlsFiles, TlsFiles]) -> None:
    pair = make_tls_pair()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(pair.sender.address, timeout=WAIT_S) as raw,
        pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"),
        context.wrap_socket(raw) as wrapped,
    ):
        wrapped.recv(1)


def test_tls_12_is_refused(make_tls_pair: PairMaker, files: tuple[TlsFiles, TlsFiles]) -> None:
    pair = make_tls_pair()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(files[1].cert, files[1].key)
    with socket.create_connection(pair.sender.address, timeout=WAIT_S) as raw, pytest.raises(ssl.SSLError):
        context.wrap_socket(raw)


def test_a_certificate_without_the_secret_opens_nothing(make_tcp: PairMaker, files: tuple[TlsFiles, TlsFiles]) -> None:
    options = replace(PATIENT, tls=files[0], secret=SECRET)
    pair = make_tcp(options, receive_options=replace(options, tls=files[1], secret=b"another"), token_bytes=1024)
    end = transfer(pair)
    assert end.reason == Reason.HANDSHAKE
    assert "TOLLBRIDGE_SECRET" in end.detail


@pytest.mark.parametrize("plain", ["prefill", "decode"])
def test_a_side_with_tls_never_speaks_plain(make_tls_pair: PairMaker, plain: str) -> None:
    pair = make_tls_pair(**{plain: None})
    with Tap(pair.sender.address) as tap:
        end = transfer(pair, tap.address)
        assert end.outcome == "failed"
        said_by_tls = tap.to_prefill if plain == "prefill" else tap.to_decode
        assert b"TBKV" not in said_by_tls
        assert FINGERPRINT.layout.encode() not in tap.to_prefill + tap.to_decode


def test_unusable_files_are_a_config_error(files: tuple[TlsFiles, TlsFiles], tmp_path: Path) -> None:
    cache = Cache(4, 16, seed=0)
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")
    for broken in (
        replace(files[0], key=str(tmp_path / "absent")),
        replace(files[0], key=files[1].key),
        replace(files[0], ca=str(nonsense)),
        replace(files[0], cert=str(nonsense)),
    ):
        with pytest.raises(ConfigError, match=r"transfer\.tls cannot be used"):
            TcpSender(cache.memory, FINGERPRINT, TransferOptions(tls=broken))
        with pytest.raises(ConfigError, match=r"transfer\.tls cannot be used"):
            TcpReceiver(cache.memory, FINGERPRINT, TransferOptions(tls=broken))


# ── somebody in the path ──


class Tap:
    """Forwards bytes without understanding them, keeps them, and may spoil them."""

    def __init__(
        self, target: tuple[str, int], spoil: Callable[[int, bytes], bytes] = lambda offset, data: data
    ) -> None:
        self._target = target
        self._spoil = spoil  # (offset, bytes) towards decode
        self.to_decode, self.to_prefill = bytearray(), bytearray()
        self._socks: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            decode, _ = self._listener.accept()
            prefill = socket.create_connection(self._target)
            self._socks += [decode, prefill]
            for args in ((prefill, decode, self.to_decode, self._spoil), (decode, prefill, self.to_prefill, None)):
                self._threads.append(threading.Thread(target=self._pump, args=args))
                self._threads[-1].start()

    def _pump(
        self,
        source: socket.socket,
        target: socket.socket,
        seen: bytearray,
        spoil: Callable[[int, bytes], bytes] | None,
    ) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                offset = len(seen)
                seen += data
                target.sendall(spoil(offset, data) if spoil else data)
        for sock in (source, target):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Tap:
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for sock in self._socks:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in self._socks:
            sock.close()


@pytest.mark.parametrize("secure", [True, False])
def test_who_taps_the_wire_reads_nothing(make_tls_pair: PairMaker, make_tcp: PairMaker, secure: bool) -> None:
    pair = make_tls_pair() if secure else make_tcp(token_bytes=1024)
    with Tap(pair.sender.address) as tap:
        transfer_id = new_id()
        assert transfer(pair, tap.address, transfer_id).outcome == "done"
        assert pair.sent.wait(transfer_id).outcome == "done"
        wire = bytes(tap.to_decode + tap.to_prefill)
        kv = pair.send_cache.tokens(TABLE, 0, NUM_TOKENS)[NUM_LAYERS // 2].tobytes()
        clear = [kv[:64], kv[-64:], b"TBKV", bytes.fromhex(transfer_id), FINGERPRINT.layout.encode()]
        assert [words in wire for words in clear] == [not secure] * len(clear)


@pytest.mark.parametrize("position", [300, 60_000, 2_000_000])
def test_a_changed_byte_kills_the_connection_and_decode_recomputes(make_tls_pair: PairMaker, position: int) -> None:
    def flip(offset: int, data: bytes) -> bytes:
        index = position - offset
        return data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :] if 0 <= index < len(data) else data

    pair = make_tls_pair()
    with Tap(pair.sender.address, flip) as tap:
        end = transfer(pair, tap.address)
        assert end.outcome == "failed"
        assert end.reason == (Reason.HANDSHAKE if position == 300 else Reason.PROTOCOL)
        assert "TLS" in end.detail
        assert transfer(pair).outcome == "done"  # straight to prefill: nothing is left of it
    assert pair.receiver.statistics().num_connections == 1


def test_a_handshake_cannot_be_relayed_over_somebody_elses_certificate(
    make_tls_pair: PairMaker, ca: trustme.CA, tmp_path: Path
) -> None:
    """A third party with a certificate of the CA, but without the secret, ends TLS both ways and passes all on."""
    pair, middle = make_tls_pair(), Tls(make_tls(tmp_path, "middle", ca))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_relay, args=(listener, middle, pair.sender.address))
        thread.start()
        end = transfer(pair, listener.getsockname()[:2])
        assert end.reason == Reason.HANDSHAKE
        assert "does not know this cluster's secret" in end.detail
        thread.join()


def _relay(listener: socket.socket, tls: Tls, target: tuple[str, int]) -> None:
    plain, _ = listener.accept()
    with (
        suppress(OSError),
        tls.accept.wrap_socket(plain, server_side=True) as decode,
        tls.dial.wrap_socket(socket.create_connection(target)) as prefill,
    ):
        for source, sink in ((decode, prefill), (prefill, decode), (decode, prefill), (prefill, decode)):
            sink.sendall(source.recv(65536))


# ── the channel by itself ──


@pytest.fixture
def channels(files: tuple[TlsFiles, TlsFiles]) -> Iterator[tuple[TlsChannel, TlsChannel]]:
    dial_sock, accept_sock = socket.socketpair()
    dial, accept = (
        TlsChannel(dial_sock, Tls(files[0]), accepting=False),
        TlsChannel(accept_sock, Tls(files[1]), accepting=True),
    )
    for channel in (dial, accept):
        channel.sock.setblocking(False)
        channel.start()
    with suppress(BlockingIOError):
        dial.recv_into(memoryview(bytearray(1)))
    assert dial.held  # a writable socket would not help
    while not (dial._secured and accept._secured):
        for channel in (accept, dial):
            with suppress(BlockingIOError):
                channel.recv_into(memoryview(bytearray(1)))
    yield dial, accept
    for channel in (dial, accept):
        channel.sock.close()


def test_a_blocked_write_goes_on_with_joined_buffers(channels: tuple[TlsChannel, TlsChannel]) -> None:
    """The writer joins what is left of a frame when its blocks are released: OpenSSL must not mind."""
    dial, accept = channels
    data = bytes(np.random.default_rng(0).integers(0, 256, 4_000_000, dtype=np.uint8))
    buffers = [memoryview(data)[start : start + 1000] for start in range(0, len(data), 1000)]
    received, sent, is_joined = bytearray(), 0, False
    while len(received) < len(data):
        try:
            while sent < len(data):
                sent += dial.sendmsg([memoryview(data)[sent:]] if is_joined else _rest(buffers, sent))
        except BlockingIOError:
            is_joined = True
        target = memoryview(bytearray(100_000))
        with suppress(BlockingIOError):
            received += target[: accept.recvmsg_into([target[:10], target[10:70_000], target[70_000:]])]
    assert is_joined
    assert received == data
    assert not dial.held


def _rest(buffers: list[memoryview], sent: int) -> list[memoryview]:
    return [buffers[sent // 1000][sent % 1000 :], *buffers[sent // 1000 + 1 :]]


def test_received_bytes_that_no_selector_reports(channels: tuple[TlsChannel, TlsChannel]) -> None:
    dial, accept = channels
    dial.sendmsg([memoryview(b"x" * 100)])
    assert accept.recv_into(memoryview(bytearray(60))) == 60
    assert accept.buffered()
    assert accept.recv_into(memoryview(bytearray(60))) == 40
    assert not accept.buffered()


def test_both_ends_agree_on_what_binds_them(channels: tuple[TlsChannel, TlsChannel]) -> None:
    assert channels[0].binding() == channels[1].binding() != b""


def test_the_front_is_whole_records_and_never_shrinks() -> None:
    sizes = [64, 5000, 40_000, 300_000, 7]
    buffers = [memoryview(bytes([index]) * size) for index, size in enumerate(sizes)]
    while buffers:
        front = _front(buffers)
        joined = memoryview(b"".join(buffers))
        assert front == joined[: len(front)]
        assert len(front) % RECORD_BYTES == 0 or len(front) == len(joined)
        assert len(_front([joined])) >= len(front)
        rest = joined[len(front) :]
        buffers = [rest[:10], rest[10:]] if len(rest) > 10 else [rest] if rest else []
