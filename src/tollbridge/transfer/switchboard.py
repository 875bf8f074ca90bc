"""The I/O thread of one side: its selector, its connections, its clock ticks, and the engine's requests.

Every session, book and connection of a side is touched by this thread only. The engine's thread hands over closures
(`post`, or `call` when it must know that they ran), so there are no locks but the ledger's and no lock order to get
wrong. The thread never blocks but in `select`.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

from tollbridge.clock import Clock
from tollbridge.errors import TransferError
from tollbridge.transfer.base import Reason
from tollbridge.transfer.channel import Tls, make_channel
from tollbridge.transfer.connection import Connection, Side
from tollbridge.transfer.handshake import Handshake
from tollbridge.transfer.net import Waker, tune
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.tally import Verdict

logger = logging.getLogger(__name__)

_MAX_CONTROL_BACKLOG = 1024 * 1024  # bytes of control frames for a peer that does not read: it is as good as dead


class Owner(Side, Protocol):
    """The medium's side: what a connection needs, and what the thread needs."""

    def lost(self, connection: int, verdict: Verdict) -> None: ...
    def busy(self, connection: int) -> bool: ...
    def active(self) -> bool: ...
    def tick(self) -> None: ...
    def closing(self) -> None:
        """Refuse new transfers from now on."""
        ...

    def stopped(self) -> None:
        """Run last in the thread, all connections being closed: end what is left."""
        ...


class Switchboard:
    """See the top of the file. Also the books' Wire."""

    def __init__(
        self, owner: Owner, options: TransferOptions, clock: Clock, *, tls: Tls | None, incarnation: int, name: str
    ) -> None:
        self._owner = owner
        self._options = options
        self._clock = clock
        self._incarnation = incarnation
        self._tls = tls
        self._selector = selectors.DefaultSelector()
        self._waker = Waker()
        self._tasks: deque[Callable[[], None]] = deque()
        self._signalled = False
        self._stopping = False
        self._connections: dict[int, Connection] = {}
        self._dirty: set[int] = set()  # connections to flush at the end of this turn
        self._unread: set[int] = set()  # connections whose channel holds received bytes: no selector reports them
        self._later: dict[int, float] = {}  # connections to flush at a time: the bandwidth cap holds them back
        self._next_number = 0
        self._tick_s = min(0.25, options.heartbeat_s / 4, options.progress_timeout_s / 8)
        self._ticked_s = clock.monotonic()
        self._selector.register(self._waker, selectors.EVENT_READ, self._woken)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # ── any thread ──

    def start(self) -> None:
        self._thread.start()

    def post(self, task: Callable[[], None]) -> None:
        """Run `task` in the I/O thread soon; dropped once the thread is stopping."""
        self._tasks.append(task)
        if not self._signalled:
            self._signalled = True
            self._waker.wake()

    def call(self, task: Callable[[], None]) -> None:
        """Run `task` in the I/O thread and return when it has run; re-raises what it raised."""
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            task()
            return
        done, errors = threading.Event(), list[BaseException]()
        self.post(partial(_run_and_tell, task, done, errors))
        while not done.wait(0.1):
            if not self._thread.is_alive():
                return  # stopped: no thread touches anything any more
        if errors:
            raise errors[0]

    def stop(self) -> None:
        """End the thread and join it. Idempotent."""
        if self._thread.is_alive():
            self.post(self._request_stop)
            self._thread.join()

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    @property
    def goodput_bytes_per_s(self) -> float:
        """The best that a connection did while it had something to send; 0 before the first measurement."""
        return max((connection.meter.bytes_per_s for connection in self.connections()), default=0.0)

    # ── the I/O thread ──

    def emit(self, connection: int, frame: bytes) -> None:
        """Queue a control frame; see Wire."""
        target = self._connections.get(connection)
        if target is not None:
            target.send(frame)
            self._dirty.add(connection)

    def release(self, connection: int, transfer: bytes) -> None:
        """Let go of a transfer's blocks; see Wire."""
        target = self._connections.get(connection)
        if target is not None:
            target.release(transfer)

    def flush_soon(self, connection: int) -> None:
        """Look for something to send there at the end of this turn."""
        self._dirty.add(connection)

    def flush_at(self, connection: int, when_s: float) -> None:
        """Look for something to send there at `when_s`."""
        self._later[connection] = when_s

    def get(self, connection: int) -> Connection | None:
        return self._connections.get(connection)

    def connections(self) -> list[Connection]:
        return list(self._connections.values())

    def listen(self, listener: socket.socket, accept: Callable[[int], None]) -> None:
        """Call `accept` when `listener` has something. Before `start`."""
        self._selector.register(listener, selectors.EVENT_READ, accept)

    def reserve(self) -> int:
        """Return a number for a connection that will be added later."""
        self._next_number += 1
        return self._next_number

    def add(
        self,
        sock: socket.socket,
        peer: tuple[str, int],
        handshake: Handshake,
        *,
        connecting: bool,
        number: int | None = None,
    ) -> None:
        """Take over a socket and begin its handshake, once its connect is through if it is `connecting`."""
        tune(sock, self._options)
        connection = Connection(
            self.reserve() if number is None else number,
            make_channel(sock, self._tls, accepting=not connecting),
            peer,
            handshake=handshake,
            incarnation=self._incarnation,
            side=self._owner,
            options=self._options,
            clock=self._clock,
            connecting=connecting,
        )
        self._connections[connection.number] = connection
        self._watch(connection)
        if not connecting:
            self._guard(connection, connection.start)
            self._dirty.add(connection.number)

    def drop(self, connection: Connection, verdict: Verdict) -> None:
        """Close a connection and end its transfers. Its buffers go first, so nothing touches their blocks."""
        if self._connections.pop(connection.number, None) is None:
            return
        self._dirty.discard(connection.number)
        self._unread.discard(connection.number)
        self._later.pop(connection.number, None)
        if connection.interest:
            self._selector.unregister(connection.sock)
        with suppress(OSError):
            connection.sock.shutdown(socket.SHUT_WR)
        connection.sock.close()
        self._owner.lost(connection.number, verdict)

    # ── inside ──

    def _request_stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except Exception:
            logger.exception("The KV I/O thread failed; all of its transfers end.")
        finally:
            self._stopping = True
            self._shut()

    def _turn(self) -> None:
        for key, mask in self._selector.select(self._timeout_s()):
            key.data(mask)
        for connection in [self._connections[number] for number in self._unread]:
            self._handle(connection, selectors.EVENT_READ)
        while self._tasks:
            self._tasks.popleft()()
        now_s = self._clock.monotonic()
        if now_s - self._ticked_s >= self._tick_s:
            self._ticked_s = now_s
            self._tick(now_s)
        for number in [number for number, when_s in self._later.items() if when_s <= now_s]:
            del self._later[number]
            self._dirty.add(number)
        while self._dirty:
            self._flush(self._dirty.pop())

    def _timeout_s(self) -> float | None:
        if self._dirty or self._tasks or self._unread:
            return 0.0
        now_s = self._clock.monotonic()
        waits = [when_s - now_s for when_s in self._later.values()]
        if self._connections or self._owner.active():
            waits.append(self._ticked_s + self._tick_s - now_s)
        return max(0.0, min(waits)) if waits else None

    def _woken(self, mask: int) -> None:
        self._waker.clear()
        self._signalled = False

    def _tick(self, now_s: float) -> None:
        for connection in self.connections():
            verdict = self._overdue(connection, now_s)
            if verdict is not None:
                self.drop(connection, verdict)
        self._owner.tick()

    def _overdue(self, connection: Connection, now_s: float) -> Verdict | None:
        options = self._options
        name = f"{connection.peer[0]}:{connection.peer[1]}"
        if not connection.ready:
            if now_s < connection.deadline_s:
                return None
            what = "could not be reached" if connection.connecting else "did not finish the handshake"
            reason = Reason.PEER_LOST if connection.connecting else Reason.HANDSHAKE
            return Verdict("failed", reason, f"{name} {what} within {options.handshake_timeout_s:g} s.")
        if not self._owner.busy(connection.number):
            connection.heard_s = now_s
            return Verdict("failed", Reason.PEER_LOST, "Its keys were used up.") if connection.channel.worn else None
        # a little before its transfers give up, so that the dead connection goes too and the next transfer dials anew
        limit_s = 0.9 * options.progress_timeout_s
        silent = now_s - connection.heard_s > limit_s
        stuck = connection.wants_write and now_s - connection.moved_s > limit_s
        flooded = connection.control_backlog_bytes > _MAX_CONTROL_BACKLOG
        if silent or stuck or flooded:
            what = "sent nothing" if silent else "took nothing"
            return Verdict("failed", Reason.STALLED, f"{name} {what} for {limit_s:g} s.")
        return None

    def _handle(self, connection: Connection, mask: int) -> None:
        if connection.number not in self._connections:
            return  # dropped earlier in this turn
        if connection.connecting:
            self._guard(connection, connection.start)
        elif mask & selectors.EVENT_READ:
            self._guard(connection, connection.readable)
        self._dirty.add(connection.number)

    def _flush(self, number: int) -> None:
        connection = self._connections.get(number)
        if connection is not None:
            self._guard(connection, connection.flush)
            self._watch(connection)

    def _guard(self, connection: Connection, action: Callable[[], None]) -> None:
        """Run `action`; an error costs this connection and no other."""
        try:
            action()
        except TransferError as error:
            logger.warning("KV connection with %s:%d: %s", *connection.peer, error.message)
            connection.refuse(error)
            self.drop(connection, connection.verdict(error))
        except OSError as error:
            self.drop(connection, connection.verdict(error))
        except Exception as error:
            logger.exception("KV connection with %s:%d failed.", *connection.peer)
            self.drop(connection, connection.verdict(TransferError(f"Internal error: {error}.")))

    def _watch(self, connection: Connection) -> None:
        """Tell the selector what this connection waits for."""
        if connection.number not in self._connections:
            return
        (self._unread.add if connection.channel.buffered() else self._unread.discard)(connection.number)
        interest = selectors.EVENT_WRITE if connection.wants_write else 0
        if not connection.connecting:
            interest |= selectors.EVENT_READ
        if interest == connection.interest:
            return
        data = partial(self._handle, connection)
        if connection.interest:
            self._selector.modify(connection.sock, interest, data)
        else:
            self._selector.register(connection.sock, interest, data)
        connection.interest = interest

    def _shut(self) -> None:
        """Flush what the kernel takes at once, close everything, and run what was still asked of this thread."""
        for connection in self.connections():
            self._guard(connection, connection.flush)
            self.drop(connection, Verdict("cancelled", Reason.SHUTDOWN, "This worker is shutting down."))
        self._owner.closing()
        while self._tasks:
            self._tasks.popleft()()
        self._owner.stopped()
        self._selector.close()
        self._waker.close()


def _run_and_tell(task: Callable[[], None], done: threading.Event, errors: list[BaseException]) -> None:
    try:
        task()
    except Exception as error:  # noqa: BLE001 - handed to the thread that asked
        errors.append(error)
    finally:
        done.set()
