"""Puts the TCP medium on the simulated network: no sockets, no threads, no waiting."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tests.transfer.storm.network import SimNetwork, SimSocket
from tollbridge.transfer.switchboard import Switchboard


class SimSelector:
    """Says what is ready now; never waits."""

    def __init__(self) -> None:
        self._keys: dict[int, SimpleNamespace] = {}

    def register(self, target: Any, events: int, data: Any) -> None:
        self._keys[id(target)] = SimpleNamespace(target=target, events=events, data=data)

    def modify(self, target: Any, events: int, data: Any) -> None:
        self.register(target, events, data)

    def unregister(self, target: Any) -> None:
        del self._keys[id(target)]

    def select(self, timeout: float | None) -> list[tuple[SimpleNamespace, int]]:
        found = []
        for key in list(self._keys.values()):
            ready = selectors.EVENT_READ if key.target.readable else 0
            ready |= selectors.EVENT_WRITE if key.target.writable else 0
            if ready & key.events:
                found.append((key, ready & key.events))
        return found

    def close(self) -> None:
        self._keys.clear()


class SimWaker:
    """Nobody sleeps."""

    readable = writable = False

    def wake(self) -> None: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...


_running: list[Switchboard] = []  # the board whose thread this would be, at the end


@contextmanager
def _as_thread_of(board: Switchboard) -> Iterator[None]:
    _running.append(board)
    try:
        yield
    finally:
        _running.pop()


def turn(board: Switchboard) -> None:
    """Do what the thread of this board does between two waits."""
    with _as_thread_of(board):
        board._turn()


def shut(board: Switchboard) -> None:
    """Do what the thread of this board does last."""
    with _as_thread_of(board):
        board._shut()


def _call(board: Switchboard, task: Callable[[], None]) -> None:
    """Run a task behind all that was posted before, as the thread would."""
    with _as_thread_of(board):
        board._run_tasks()
        task()


@contextmanager
def simulated(network: SimNetwork, port: int) -> Iterator[None]:
    """Build media on `network` inside: without threads, so their boards are turned by hand."""
    fakes = {
        "switchboard.selectors": SimpleNamespace(
            DefaultSelector=SimSelector, EVENT_READ=selectors.EVENT_READ, EVENT_WRITE=selectors.EVENT_WRITE
        ),
        "switchboard.Waker": SimWaker,
        "switchboard.Switchboard.start": lambda board: None,
        "switchboard.Switchboard.call": _call,
        "switchboard.Switchboard._here": property(lambda board: _running[-1:] == [board]),
        "tcp_send.listen": lambda options: network.listen(port),
        "tcp_receive.socket": SimpleNamespace(
            socket=lambda *kind: SimSocket(network),
            AF_INET=socket.AF_INET,
            AF_INET6=socket.AF_INET6,
            SOCK_STREAM=socket.SOCK_STREAM,
        ),
    }
    with ExitStack() as stack:
        for name, fake in fakes.items():
            stack.enter_context(patch(f"tollbridge.transfer.{name}", fake))
        yield
