"""One I/O thread: its selector, its connections, its clock ticks, and what others ask of it.

A connection is touched by its own thread only, but for what connection.py says. Other threads hand over closures
(`post`, or `call` when they must know that it ran). The thread never blocks but in `select`, and for as long as the
monitor's lock or a copy to or from a GPU takes. A side has one such thread or several (lanes.py); the first also keeps
the heartbeats and deadlines of the transfers.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
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
from tollbridge.transfer.watchdog import overdue

logger = logging.getLogger(__name__)

_ROOM_S = 0.001  # how soon to look again for room for what arrived, or for the end of a write to a ring

_SHUTDOWN = Verdict("cancelled", Reason.SHUTDOWN, "This worker is shutting down.")


class Owner(Side, Protocol):
    """The medium's side: what a connection needs, and what the thread needs."""

    def lost(self, connection: Connection, verdict: Verdict) -> None: ...
    def busy(self, pair: int) -> bool: ...
    def active(self) -> bool: ...
    def tick(self) -> None: ...
    def crashed(self) -> None:
        """An I/O thread met a bug and ends: so must the others."""
        ...

    def closing(self) -> None:
        """Refuse new transfers from now on."""
        ...

    def stopped(self) -> None:
        """Run last in the first thread, its connections being closed: end what is left."""
        ...


class Switchboard:
    """See the top of the file. `numbers` are those of all connections of the side; `index` is this thread's."""

    def __init__(
        self,
        owner: Owner,
        options: TransferOptions,
        clock: Clock,
        *,
        tls: Tls | None,
        incarnation: int,
        numbers: Iterator[int],
        index: int,
        name: str,
    ) -> None:
        self._owner = owner
        self._options = options
        self._clock = clock
        self._incarnation = incarnation
        self._tls = tls
        self._selector = selectors.DefaultSelector()
        self._waker = Waker()
        self._tasks: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()  # around `_tasks` and the two flags below
        self._signalled = False
        self._closed = False  # no task is taken any more
        self._stopping = False
        self._connections: dict[int, Connection] = {}
        self._dirty: set[int] = set()  # connections to flush at the end of this turn
        self._unread: set[int] = set()  # connections whose channel holds received bytes: no selector reports them
        self._later: dict[int, float] = {}  # connections to flush at a time: the bandwidth cap holds them back
        self._numbers = numbers
        self._index = index
        self._tick_s = min(0.25, options.heartbeat_s / 4, options.progress_timeout_s / 8)
        self._ticked_s = clock.monotonic()
        self._selector.register(self._waker, selectors.EVENT_READ, self._woken)
        self._thread = threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True)

    # ── any thread ──

    def start(self) -> None:
        self._thread.start()

    def post(self, task: Callable[[], None]) -> bool:
        """Run `task` in the I/O thread soon; return False when that has ended, and the task will not run."""
        with self._lock:
            if self._closed:
                return False
            self._tasks.append(task)
            signalled, self._signalled = self._signalled, True
        if not signalled:
            self._waker.wake()
        return True

    def call(self, task: Callable[[], None]) -> None:
        """Run `task` in the I/O thread and return when it has run; re-raises what it raised."""
        done, errors = threading.Event(), list[BaseException]()
        if self._here or not self.post(partial(_run_and_tell, task, done, errors)):
            task()
            return
        done.wait()
        if errors:
            raise errors[0]

    def stop(self) -> None:
        """End the thread and join it. Idempotent."""
        if self._thread.is_alive():
            self.request_stop()
            self._thread.join()

    def request_stop(self) -> None:
        """Let the thread end soon."""
        self.post(self._request_stop)

    def emit(self, connection: int, frame: bytes) -> None:
        """Queue a control frame; dropped when the connection is gone."""
        self._do(partial(self._emit, connection, frame))

    def flush_soon(self, connection: int) -> None:
        """Look for something to send there at the end of this turn."""
        self._do(partial(self._dirty.add, connection))

    def drop_soon(self, connection: Connection, verdict: Verdict) -> None:
        """Close a connection, not within what is going on in this thread."""
        connection.doomed = verdict
        self.post(partial(self.drop, connection, verdict))

    def connections(self) -> list[Connection]:
        return list(self._connections.values())

    # ── the I/O thread ──

    def flush_at(self, connection: int, when_s: float) -> None:
        """Look for something to send there at `when_s`."""
        self._later[connection] = when_s

    def get(self, connection: int) -> Connection | None:
        return self._connections.get(connection)

    def listen(self, listener: socket.socket, accept: Callable[[int], None]) -> None:
        """Call `accept` when `listener` has something. Before `start`."""
        self._selector.register(listener, selectors.EVENT_READ, accept)

    def reserve(self) -> int:
        """Return a number for a connection that will be added later."""
        return next(self._numbers)

    def add(
        self,
        sock: socket.socket,
        peer: tuple[str, int],
        handshake: Handshake,
        *,
        connecting: bool,
        number: int | None = None,
        pair: int | None = None,
    ) -> None:
        """Take over a socket and begin its handshake, once its connect is through if it is `connecting`.

        `pair` is the number of the first lane that this one shall join, if it is known.
        """
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
            pair=pair,
            home=self._index,
        )
        self._take_over(connection)
        if not connecting:
            self._guard(connection, connection.start)

    def give(self, connection: Connection, other: Switchboard) -> None:
        """Hand a connection over to another thread. Not while this one is inside the connection."""
        if connection.number not in self._connections:
            return  # dropped meanwhile
        self._forget(connection)
        connection.home = other._index
        if not other.post(partial(other._take_over, connection)):
            self._lose(connection, _SHUTDOWN)

    def drop(self, connection: Connection, verdict: Verdict) -> None:
        """Close a connection and end its transfers. Its buffers go first, so nothing touches their blocks."""
        if connection.number in self._connections:
            self._forget(connection)
            self._lose(connection, verdict)

    # ── inside ──

    @property
    def _here(self) -> bool:
        return threading.current_thread() is self._thread

    def _do(self, task: Callable[[], None]) -> None:
        """Run `task` in the I/O thread: now, if this is it."""
        if self._here:
            task()
        else:
            self.post(task)

    def _emit(self, connection: int, frame: bytes) -> None:
        target = self._connections.get(connection)
        if target is not None:
            target.send(frame)
            self._dirty.add(connection)

    def _take_over(self, connection: Connection) -> None:
        self._connections[connection.number] = connection
        self._watch(connection)
        self._dirty.add(connection.number)
        if connection.doomed is not None:  # while it was between two threads
            self.drop(connection, connection.doomed)

    def _forget(self, connection: Connection) -> None:
        del self._connections[connection.number]
        self._dirty.discard(connection.number)
        self._unread.discard(connection.number)
        self._later.pop(connection.number, None)
        if connection.interest:
            self._selector.unregister(connection.sock)
            connection.interest = 0

    def _lose(self, connection: Connection, verdict: Verdict) -> None:
        connection.close()
        self._owner.lost(connection, verdict)

    def _request_stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except Exception:
            logger.exception("A KV I/O thread failed; all transfers end.")
            self._owner.crashed()
        finally:
            self._stopping = True
            self._shut()

    def _turn(self) -> None:
        for key, mask in self._selector.select(self._timeout_s()):
            key.data(mask)
        for connection in [self._connections[number] for number in self._unread]:
            self._handle(connection, selectors.EVENT_READ)
        self._run_tasks()
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
        if self._connections or (self._index == 0 and self._owner.active()):
            waits.append(self._ticked_s + self._tick_s - now_s)
        return max(0.0, min(waits)) if waits else None

    def _woken(self, mask: int) -> None:
        self._waker.clear()
        with self._lock:
            self._signalled = False

    def _run_tasks(self) -> None:
        while self._tasks:
            self._tasks.popleft()()

    def _tick(self, now_s: float) -> None:
        for connection in self.connections():
            verdict = overdue(connection, self._options, now_s, busy=self._owner.busy(connection.pair))
            if verdict is not None:
                self.drop(connection, verdict)
            elif connection.in_frame:
                self._handle(connection, selectors.EVENT_READ)  # what came is less than is awaited, and yet progress
        if self._index == 0:
            self._owner.tick()

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
        interest = selectors.EVENT_WRITE if connection.wants_write else 0
        if connection.placing:
            self.flush_at(connection.number, self._clock.monotonic() + _ROOM_S)
        self._unread.discard(connection.number)
        if connection.waits_for_room:
            self.flush_at(connection.number, self._clock.monotonic() + _ROOM_S)
        elif not connection.connecting:
            interest |= selectors.EVENT_READ
            if connection.channel.buffered():
                self._unread.add(connection.number)
        if interest == connection.interest:
            return
        data = partial(self._handle, connection)
        if not interest:
            self._selector.unregister(connection.sock)
        elif connection.interest:
            self._selector.modify(connection.sock, interest, data)
        else:
            self._selector.register(connection.sock, interest, data)
        connection.interest = interest

    def _shut(self) -> None:
        """Flush what the kernel takes at once, close everything, and run what was still asked of this thread."""
        for connection in self.connections():
            self._guard(connection, connection.flush)
            self.drop(connection, _SHUTDOWN)
        if self._index == 0:
            self._owner.closing()
        self._close()
        if self._index == 0:
            self._owner.stopped()
        self._selector.close()
        self._waker.close()

    def _close(self) -> None:
        """Run what is still asked of this thread, then take no more."""
        while not self._closed:
            try:
                self._run_tasks()
            except Exception:
                logger.exception("A task failed while a KV I/O thread was ending.")
            for connection in self.connections():
                self.drop(connection, _SHUTDOWN)  # another thread had just given it
            with self._lock:
                self._closed = not self._tasks


def _run_and_tell(task: Callable[[], None], done: threading.Event, errors: list[BaseException]) -> None:
    try:
        task()
    except Exception as error:  # noqa: BLE001 - handed to the thread that asked
        errors.append(error)
    finally:
        done.set()
