"""The listening side of a link probe: one prober at a time, strangers refused, memory and time bounded."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from contextlib import suppress
from functools import singledispatchmethod

from tollbridge.config.address import Address, is_loopback
from tollbridge.errors import ConfigError, ProtocolError, StartupError, TollbridgeError, TransferError
from tollbridge.probe import link_wire as wire
from tollbridge.probe.link_kv import KvSettings, KvSink, KvSource
from tollbridge.probe.link_raw import RawFlow

log = logging.getLogger("tollbridge.probe")

_HANDSHAKE_S = 5.0
_SILENCE_S = 90.0  # a prober that says nothing for so long has gone
_MAX_UNPROVEN = 96  # connections that have not said yet what they are
_JOIN_S = 10.0


def require_secret(host: str, secret: bytes) -> None:
    """Raise ConfigError when `host` is another machine and there is no secret."""
    if not secret and not is_loopback(host):
        raise ConfigError(f"A probe between hosts ({host}) needs the cluster secret: set TOLLBRIDGE_SECRET on both.")


class LinkServer:
    """Listens; `serve` until `close` is called from elsewhere, or for ever."""

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        require_secret(host, secret)
        self._secret = secret
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise StartupError(f"The probe cannot listen on {host}:{port}: {error.strerror}.") from None
        self.address = Address(host=host, port=self._listener.getsockname()[1])
        self._room = threading.Semaphore(_MAX_UNPROVEN)
        self._busy = threading.Lock()
        self._session: _Session | None = None

    def serve(self) -> None:
        while True:
            try:
                sock, peer = self._listener.accept()
            except OSError:
                return  # closed
            if not self._room.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._meet, args=(sock, str(peer[0])), daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    # ── inside ──

    def _meet(self, sock: socket.socket, peer: str) -> None:
        """Let one connection prove itself, and hand it to what it is for."""
        first: wire.AnyMessage | None = None
        try:
            sock.settimeout(_HANDSHAKE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire.accept_proof(sock, self._secret)
            first = wire.hear(sock)
        except (OSError, TollbridgeError) as error:
            log.warning("refused %s: %s", peer, error)
        finally:
            self._room.release()
        session = self._session
        if isinstance(first, wire.Join) and session is not None and session.takes(first, sock):
            return  # the flow owns it now
        with sock:
            if isinstance(first, wire.Begin):
                self._control(sock, peer)

    def _control(self, sock: socket.socket, peer: str) -> None:
        if not self._busy.acquire(blocking=False):
            with suppress(OSError):
                wire.say(sock, wire.Refused(detail="it is serving another prober: try again in a minute."))
            return
        session = self._session = _Session(sock, peer, self._secret)
        log.info("probed by %s", peer)
        try:
            session.run()
        except (OSError, TollbridgeError) as error:
            log.info("the probe by %s ended: %s", peer, error)
        finally:
            self._session = None
            session.close()
            self._busy.release()


class _Session:
    """One prober and what runs for it."""

    def __init__(self, sock: socket.socket, peer: str, secret: bytes) -> None:
        self._sock, self._peer = sock, peer
        self._settings = KvSettings(host=str(sock.getsockname()[0]), secret=secret)
        self._id = secrets.token_bytes(16)
        self._orders: dict[int, wire.Flow] = {}
        self._joined: dict[int, list[socket.socket]] = {}
        self._flows: dict[int, RawFlow] = {}
        self._changed = threading.Condition()
        self._kv: KvSource | KvSink | None = None

    def run(self) -> None:
        """Obey until the prober leaves."""
        self._sock.settimeout(_SILENCE_S)
        wire.say(self._sock, wire.Begun(session=self._id))
        while True:
            order = wire.hear(self._sock)
            wire.say(self._sock, self._obey(order))

    def takes(self, join: wire.Join, sock: socket.socket) -> bool:
        """Take a connection into its flow, which begins when it is complete."""
        with self._changed:
            order = self._orders.get(join.flow)
            if not secrets.compare_digest(join.session, self._id) or order is None:
                return False
            joined = self._joined[join.flow]
            joined.append(sock)
            if len(joined) == order.streams:
                self._flows[join.flow] = RawFlow(joined, sends=order.sends, seconds=order.seconds)
                del self._orders[join.flow], self._joined[join.flow]
                self._changed.notify_all()
            return True

    def close(self) -> None:
        with self._changed:
            self._orders.clear()
            waiting = [sock for joined in self._joined.values() for sock in joined]
        for sock in waiting:
            sock.close()
        for flow in self._flows.values():
            flow.stop()
        self._close_kv()

    # ── orders ──

    @singledispatchmethod
    def _obey(self, order: object) -> wire.AnyMessage:
        raise ProtocolError(f"{type(order).__name__} is no order.")

    @_obey.register
    def _(self, order: wire.Ping) -> wire.AnyMessage:
        return wire.Done()

    @_obey.register
    def _(self, order: wire.Flow) -> wire.AnyMessage:
        if not (1 <= order.streams <= wire.MAX_STREAMS and 0 < order.seconds <= wire.MAX_FLOW_S):
            raise ProtocolError("The prober asked for a flow beyond the bounds.")
        with self._changed:
            self._orders[order.flow], self._joined[order.flow] = order, []
        return wire.Done()

    @_obey.register
    def _(self, order: wire.Ask) -> wire.AnyMessage:
        with self._changed:
            self._changed.wait_for(lambda: order.flow in self._flows, _JOIN_S)
            flow = self._flows.pop(order.flow, None)
        return flow.wait() if flow is not None else wire.Refused(detail="its connections never came.")

    @_obey.register
    def _(self, order: wire.KvOpen) -> wire.AnyMessage:
        if not 1 <= order.streams <= wire.MAX_STREAMS:
            raise ProtocolError("The prober asked for streams beyond the bounds.")
        self._close_kv()
        if order.sends:
            source = self._kv = KvSource(self._settings, order.streams)
            return wire.KvOpened(port=source.port)
        self._kv = KvSink(self._settings, order.streams)
        return wire.KvOpened(port=0)

    @_obey.register
    def _(self, order: wire.KvOffer) -> wire.AnyMessage:
        if not isinstance(self._kv, KvSource) or not 0 < order.num_tokens <= wire.MAX_TOKENS:
            raise ProtocolError("The prober asked for a transfer beyond the bounds.")
        self._kv.offer(order.transfer_id, order.num_tokens)
        return wire.Done()

    @_obey.register
    def _(self, order: wire.KvLoad) -> wire.AnyMessage:
        if not isinstance(self._kv, KvSink) or not 0 < order.num_tokens <= wire.MAX_TOKENS:
            raise ProtocolError("The prober asked for a transfer beyond the bounds.")
        try:
            return wire.KvLoaded(seconds=self._kv.load(order.transfer_id, order.num_tokens, self._peer, order.port))
        except TransferError as error:
            return wire.KvLoaded(seconds=0.0, detail=error.message)

    @_obey.register
    def _(self, order: wire.KvClose) -> wire.AnyMessage:
        self._close_kv()
        return wire.Done()

    def _close_kv(self) -> None:
        if self._kv is not None:
            self._kv.close()
            self._kv = None
