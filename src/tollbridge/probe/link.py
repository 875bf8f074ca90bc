"""The asking side of a link probe: RTT, plain sockets and our transfer, both ways, on an idle link and a loaded one."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeVar

import msgspec
import psutil

from tollbridge.config.address import Address
from tollbridge.errors import HandshakeError, ProtocolError, TransferError, UnavailableError
from tollbridge.probe import link_wire as wire
from tollbridge.probe.link_kv import TOKEN_BYTES, KvSettings, KvSink, KvSource
from tollbridge.probe.link_raw import RawFlow
from tollbridge.probe.link_server import require_secret

Way = Literal["up", "down"]  # from here to there; from there to here
WAYS: tuple[Way, ...] = ("up", "down")
Tell = Callable[[str, float], None]
M = TypeVar("M", bound=wire.Message)

_CONNECT_S = 5.0
_ANSWER_S = 90.0
_PINGS = 20
_PING_PAUSE_S = 0.01  # beside a flow, whose queue comes and goes
_FILLING_S = 0.5  # a flow has filled the link after so long
_TRANSFERS_PER_FLOW = 4  # our transfers take as long together as a plain flow, and each a fair share of it


class LinkSample(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement. `streams` connections; `loaded`: beside one plain flow the same way."""

    way: Way
    how: Literal["raw", "transfer"]
    streams: int
    loaded: bool
    bytes_per_s: float
    low: float
    high: float


class LinkReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was found. Times are seconds; `line_bytes_per_s` is what the local NIC says of itself."""

    rtt_s: float
    rtt_loaded_s: dict[Way, float]
    line_bytes_per_s: float | None
    samples: list[LinkSample]
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class LinkEffort:
    streams: Sequence[int] = (1, 2, 4)
    seconds: float = 2.0  # of each measurement


class LinkProbe:
    """One probe of one link. UnavailableError, HandshakeError: one sentence. Use it as a context manager."""

    def __init__(self, there: Address, secret: bytes, *, effort: LinkEffort, tell: Tell) -> None:
        require_secret(there.host, secret)
        self._there, self._secret, self._effort, self._tell = there, secret, effort, tell
        self._flow_ids = iter(range(1, 1 << 30))
        self._notes: list[str] = []
        self._steps, self._step = 4 * len(effort.streams) + 7, 0
        self._control = self._dial()
        try:
            self._session = self._ask(wire.Begin(), wire.Begun).session
        except BaseException:
            self._control.close()
            raise
        self._settings = KvSettings(host=str(self._control.getsockname()[0]), secret=secret)

    def __enter__(self) -> LinkProbe:
        return self

    def __exit__(self, *_: object) -> None:
        self._control.close()

    def run(self) -> LinkReport:
        """Measure everything; it takes about `seconds` for each line of the report."""
        self._say("round trips")
        rtt_s = self._rtt_s()
        samples: list[LinkSample] = []
        loaded_s: dict[Way, float] = {}
        for way in WAYS:
            for streams in self._effort.streams:
                raw = self._raw(way, streams)
                samples += [raw, *self._transfers(way, streams, raw.bytes_per_s)]
            loaded, loaded_s[way] = self._loaded(way, samples)
            samples += loaded
        return LinkReport(
            rtt_s=rtt_s,
            rtt_loaded_s=loaded_s,
            line_bytes_per_s=line_rate(self._settings.host),
            samples=samples,
            notes=self._notes,
        )

    # ── what is measured ──

    def _rtt_s(self, *, pause_s: float = 0.0) -> float:
        """Return the median round trip of a small message, which includes two wake-ups of a process."""
        found = []
        for _ in range(_PINGS):
            begun_s = time.perf_counter()
            self._ask(wire.Ping(), wire.Done)
            found.append(time.perf_counter() - begun_s)
            time.sleep(pause_s)
        return median(found)

    def _raw(self, way: Way, streams: int, *, loaded: bool = False) -> LinkSample:
        self._say(f"{streams} plain sockets {way}")
        seconds = self._effort.seconds
        flow_id = next(self._flow_ids)
        flow = self._flow(flow_id, way, streams, seconds)
        rate = flow.wait()
        if way == "up":
            rate = self._ask(wire.Ask(flow=flow_id), wire.Rate)
        return _sample(way, "raw", streams, rate, loaded)

    def _transfers(self, way: Way, streams: int, expected: float, *, loaded: bool = False) -> list[LinkSample]:
        """Move several transfers one after another, the first of them not counted; empty when they cannot be had."""
        self._say(f"our transfer {way}, {streams} streams")
        seconds = self._effort.seconds / _TRANSFERS_PER_FLOW
        num_tokens = min(max(1, int(expected * seconds / TOKEN_BYTES)), wire.MAX_TOKENS)
        try:
            with self._mover(way, streams) as move:
                move(num_tokens)
                found = [num_tokens * TOKEN_BYTES / move(num_tokens) for _ in range(_TRANSFERS_PER_FLOW)]
        except TransferError as error:
            self._notes.append(f"Our transfer {way} with {streams} streams did not get through: {error.message}")
            return []
        rate = wire.Rate(bytes_per_s=median(found), low=min(found), high=max(found))
        return [_sample(way, "transfer", streams, rate, loaded)]

    def _loaded(self, way: Way, idle: Sequence[LinkSample]) -> tuple[list[LinkSample], float]:
        """Measure again beside a plain flow; return that, and the round trip meanwhile."""
        streams = max(self._effort.streams)
        expected = max(sample.bytes_per_s for sample in idle if sample.way == way) / 2
        seconds = min(wire.MAX_FLOW_S, 5 * self._effort.seconds + 10.0)
        beside = self._flow(next(self._flow_ids), way, 1, seconds)
        try:
            beside.wait_moved(2 * expected * _FILLING_S, 10.0)  # past its slow start and what sockets hold
            rtt_s = self._rtt_s(pause_s=_PING_PAUSE_S)
            found = [self._raw(way, 1, loaded=True), *self._transfers(way, streams, expected, loaded=True)]
        finally:
            beside.stop()
        return found, rtt_s

    # ── how ──

    def _flow(self, flow_id: int, way: Way, streams: int, seconds: float) -> RawFlow:
        order = wire.Flow(flow=flow_id, streams=streams, sends=way == "down", seconds=seconds)
        self._ask(order, wire.Done)
        sockets = [self._dial() for _ in range(streams)]
        for sock in sockets:
            wire.say(sock, wire.Join(session=self._session, flow=flow_id))
        return RawFlow(sockets, sends=way == "up", seconds=seconds)

    @contextmanager
    def _mover(self, way: Way, streams: int) -> Iterator[Callable[[int], float]]:
        """Yield what moves so many tokens and returns the seconds it took."""
        self._tell_control(wire.KvOpen(sends=way == "down", streams=streams))
        side: KvSink | KvSource  # starts a process, as the other side does meanwhile
        if way == "down":
            sink = side = KvSink(self._settings, streams)

            def move(num_tokens: int) -> float:
                transfer_id = secrets.token_hex(16)
                self._ask(wire.KvOffer(transfer_id=transfer_id, num_tokens=num_tokens), wire.Done)
                return sink.load(transfer_id, num_tokens, self._there.host, opened)
        else:
            source = side = KvSource(self._settings, streams)

            def move(num_tokens: int) -> float:
                transfer_id = secrets.token_hex(16)
                source.offer(transfer_id, num_tokens)
                load = wire.KvLoad(transfer_id=transfer_id, num_tokens=num_tokens, port=source.port)
                loaded = self._ask(load, wire.KvLoaded)
                if loaded.detail:
                    raise TransferError(loaded.detail)
                return loaded.seconds

        try:
            opened = self._hear(wire.KvOpened).port
            yield move
        finally:
            side.close()
            self._ask(wire.KvClose(), wire.Done)

    def _dial(self) -> socket.socket:
        try:
            sock = socket.create_connection((self._there.host, self._there.port), timeout=_CONNECT_S)
        except OSError as error:
            reason = error.strerror or str(error) or "no answer"
            raise UnavailableError(
                f"Nobody answers at {self._there} ({reason}): run `tollbridge probe link serve` there."
            ) from None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            wire.dial_proof(sock, self._secret)
        except (HandshakeError, ProtocolError, OSError) as error:
            sock.close()
            raise HandshakeError(f"The probe of {self._there} was refused: {error}") from None
        sock.settimeout(_ANSWER_S)
        return sock

    def _ask(self, message: wire.AnyMessage, expected: type[M]) -> M:
        self._tell_control(message)
        return self._hear(expected)

    def _tell_control(self, message: wire.AnyMessage) -> None:
        try:
            wire.say(self._control, message)
        except OSError as error:
            raise UnavailableError(f"The probe of {self._there} broke off: {error}") from None

    def _hear(self, expected: type[M]) -> M:
        try:
            answer = wire.hear(self._control)
        except (OSError, ProtocolError) as error:
            raise UnavailableError(f"The probe of {self._there} broke off: {error}") from None
        if isinstance(answer, wire.Refused):
            raise UnavailableError(f"{self._there} refused: {answer.detail}")
        if not isinstance(answer, expected):
            raise ProtocolError(f"{self._there} answered {type(answer).__name__} out of turn.")
        return answer

    def _say(self, what: str) -> None:
        self._tell(what, self._step / self._steps)
        self._step += 1


def line_rate(host: str) -> float | None:
    """Return bytes per second that the NIC with the address `host` says it has; None where it does not say."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            speed_mbit = psutil.net_if_stats()[name].speed if name in psutil.net_if_stats() else 0
            return speed_mbit * 1e6 / 8 if speed_mbit > 0 else None
    return None


def _sample(way: Way, how: Literal["raw", "transfer"], streams: int, rate: wire.Rate, loaded: bool) -> LinkSample:
    return LinkSample(
        way=way,
        how=how,
        streams=streams,
        loaded=loaded,
        bytes_per_s=max(rate.bytes_per_s, 1e-9),
        low=rate.low,
        high=rate.high,
    )
