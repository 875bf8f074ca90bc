"""How a connection reaches its socket: plain, or through mutual TLS 1.3.

Both kinds offer what the reader and the writer need: `sendmsg`, `recv_into`, `recvmsg_into`, with BlockingIOError when
the kernel (or the TLS handshake) must be waited for. Plain passes through. TLS has no gathering calls: small buffers
are joined to whole records, large ones are encrypted from where they lie.

Borrowed memory. OpenSSL wants a write that blocked repeated with the same bytes. The writer keeps the front of its
frame unchanged until it is sent (`detach` copies it), so nothing here holds on to the cache.

Who is who. Certificates are checked against the cluster's CA, both ways, and not against host names: workers move
between hosts, and the CA signs workers only. A certificate alone opens nothing, the handshake over the secret follows,
and its MACs cover `binding`, so that it cannot be relayed through a third party with a certificate of its own.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tollbridge.errors import ConfigError, HandshakeError, IntegrityError

RECORD_BYTES = 16 * 1024  # the largest TLS record
_WRITE_BYTES = 16 * RECORD_BYTES  # per call, so that progress is seen
# RFC 8446, 5.5: AES-GCM keys are good for 2**24.5 full records, and Python cannot ask OpenSSL for new ones. Decode
# leaves an idle connection well before; a connection that is never idle ends, its transfers fail and are recomputed.
_WORN_BYTES = 2**23 * RECORD_BYTES
_SPENT_BYTES = 2**24 * RECORD_BYTES


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """PEM files: this worker's certificate (chain) and private key, and the CA that signed all of the cluster's."""

    cert: str
    key: str
    ca: str


class Channel(Protocol):
    """A connection's bytes. Used by the I/O thread only."""

    sock: socket.socket  # for the selector, socket options and closing

    @property
    def held(self) -> bool:
        """Whether writing waits for bytes from the peer, so that a writable socket does not help."""
        ...

    @property
    def worn(self) -> bool:
        """Whether a new connection should replace this one when it is idle."""
        ...

    def start(self) -> None:
        """Begin; the TCP connection is up."""
        ...

    def buffered(self) -> bool:
        """Whether received bytes wait here, where the selector does not see them."""
        ...

    def binding(self) -> bytes:
        """Return what names this channel to both ends and to nobody else; empty when there is no such thing."""
        ...

    def sendmsg(self, buffers: Sequence[memoryview]) -> int: ...

    def recv_into(self, buffer: memoryview) -> int: ...

    def recvmsg_into(self, buffers: Sequence[memoryview]) -> int: ...

    def await_bytes(self, num_bytes: int) -> None:
        """Let the selector report the socket when it has about so many bytes, or the last ones: 1 for any."""
        ...


class PlainChannel:
    """The socket itself."""

    held = worn = False

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._awaited_bytes = 1

    def start(self) -> None:
        """Nothing to do."""

    def buffered(self) -> bool:
        return False

    def binding(self) -> bytes:
        return b""

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        return self.sock.sendmsg(buffers)

    def recv_into(self, buffer: memoryview) -> int:
        return self.sock.recv_into(buffer)

    def recvmsg_into(self, buffers: Sequence[memoryview]) -> int:
        return self.sock.recvmsg_into(buffers)[0]

    def await_bytes(self, num_bytes: int) -> None:
        if num_bytes != self._awaited_bytes:
            self._awaited_bytes = num_bytes
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)


class Tls:
    """The contexts of one process. ConfigError when the files cannot be used."""

    def __init__(self, files: TlsFiles) -> None:
        self.dial = _context(ssl.PROTOCOL_TLS_CLIENT, files)
        self.accept = _context(ssl.PROTOCOL_TLS_SERVER, files)
        self.certificate = _first_certificate(files.cert)  # DER


class TlsChannel:
    """Mutual TLS 1.3. The TLS handshake runs inside of the first reads and writes."""

    def __init__(self, sock: socket.socket, tls: Tls, *, accepting: bool) -> None:
        self.sock = sock
        self.held = True
        self._tls = tls
        self._accepting = accepting
        self._secured = False
        self._is_dead = False
        self._socket: ssl.SSLSocket | None = None
        self._num_bytes = 0

    @property
    def worn(self) -> bool:
        return self._num_bytes > _WORN_BYTES

    def start(self) -> None:
        context = self._tls.accept if self._accepting else self._tls.dial
        self.sock = self._socket = context.wrap_socket(
            self.sock, server_side=self._accepting, do_handshake_on_connect=False
        )

    def buffered(self) -> bool:
        return self._secured and not self._is_dead and self._wrapped().pending() > 0

    def binding(self) -> bytes:
        peer = self._wrapped().getpeercert(binary_form=True) or b""
        mine = self._tls.certificate
        dialler, listener = (peer, mine) if self._accepting else (mine, peer)
        return hashlib.sha256(dialler).digest() + hashlib.sha256(listener).digest()

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        self._secure()
        if self._num_bytes > _SPENT_BYTES:
            raise OSError("the TLS keys of this connection are used up")
        try:
            sent = self._wrapped().send(_front(buffers))
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            self.held = isinstance(error, ssl.SSLWantReadError)
            raise BlockingIOError from None
        except (ssl.SSLEOFError, ConnectionError):
            with suppress(BlockingIOError):
                self.recv_into(memoryview(bytearray(1)))  # its last word, an alert, says more than a broken pipe
            raise ConnectionResetError("the peer closed the connection") from None
        except ssl.SSLError as error:
            raise self._died(error) from None
        self._num_bytes += sent
        return sent

    def recv_into(self, buffer: memoryview) -> int:
        self._secure()
        try:
            received = self._wrapped().recv_into(buffer)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except ssl.SSLEOFError:
            raise ConnectionResetError("the peer closed the connection") from None
        except ssl.SSLError as error:
            raise self._died(error) from None
        self._num_bytes += received
        return received

    def recvmsg_into(self, buffers: Sequence[memoryview]) -> int:
        """Fill `buffers` from as many records as are there."""
        total = 0
        for buffer in buffers:
            left = buffer
            while left:
                try:
                    received = self.recv_into(left)
                except BlockingIOError:
                    if total == 0:
                        raise
                    return total
                if received == 0:
                    return total
                total += received
                left = left[received:]
        return total

    def await_bytes(self, num_bytes: int) -> None:
        """Nothing: what the kernel holds is records, in whatever number."""

    # ── inside ──

    def _wrapped(self) -> ssl.SSLSocket:
        assert self._socket is not None, "start comes first"
        return self._socket

    def _secure(self) -> None:
        """Go on with the TLS handshake; BlockingIOError until it is over."""
        if self._secured:
            return
        if self._is_dead:
            raise OSError("the TLS handshake failed")  # and not a word in plain text
        try:
            self._wrapped().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            self.held = isinstance(error, ssl.SSLWantReadError)
            raise BlockingIOError from None
        except ssl.SSLEOFError:
            raise ConnectionResetError("the peer closed the connection") from None
        except ssl.SSLError as error:
            raise self._died(error) from None
        self._secured = True
        self.held = False

    def _died(self, error: ssl.SSLError) -> HandshakeError | IntegrityError:
        """Return what a TLS error means. A peer that rejects our certificate says so after its own handshake."""
        why = error.reason or str(error)
        was_secured, self._secured, self._is_dead = self._secured, False, True
        if was_secured and "ALERT" not in why:
            return IntegrityError(f"TLS found that bytes were changed on their way ({why}).")
        return HandshakeError(
            f"TLS with the peer failed ({why}): give all workers transfer.tls with certificates of one CA, or none."
        )


def maybe_tls(files: TlsFiles | None) -> Tls | None:
    """Return the contexts for `files`, None without. ConfigError when they cannot be used."""
    return None if files is None else Tls(files)


def make_channel(sock: socket.socket, tls: Tls | None, *, accepting: bool) -> Channel:
    """Return the channel over `sock`."""
    return PlainChannel(sock) if tls is None else TlsChannel(sock, tls, accepting=accepting)


def _front(buffers: Sequence[memoryview]) -> memoryview:
    """Return the front of `buffers` in whole records, as one buffer.

    Called again after a write that blocked, it returns the same bytes, and never fewer of them.
    """
    first = buffers[0]
    if len(first) >= RECORD_BYTES:
        return first[: min(len(first) - len(first) % RECORD_BYTES, _WRITE_BYTES)]
    gathered, size = [], 0
    for buffer in buffers:
        gathered.append(buffer[: RECORD_BYTES - size])
        size += len(gathered[-1])
        if size == RECORD_BYTES:
            break
    return gathered[0] if len(gathered) == 1 else memoryview(b"".join(gathered))


def _context(protocol: ssl._SSLMethod, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(cafile=files.ca)
        context.load_cert_chain(files.cert, files.key, password="")  # without, OpenSSL asks the terminal
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"transfer.tls cannot be used ({error}): cert and key must be a PEM pair without a passphrase, here "
            f"{files.cert} and {files.key}, and ca the PEM file of the cluster's CA, here {files.ca}."
        ) from None
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # connections are long, and never resumed
    return context


def _first_certificate(path: str) -> bytes:
    text = Path(path).read_text(encoding="ascii", errors="replace")
    end = "-----END CERTIFICATE-----"
    first = text[text.index("-----BEGIN CERTIFICATE-----") : text.index(end) + len(end)]
    return ssl.PEM_cert_to_DER_cert(first)
