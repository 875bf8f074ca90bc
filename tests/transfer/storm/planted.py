"""Bugs put into the medium on purpose: a storm that does not find them proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tollbridge.transfer.lanes import Lanes
from tollbridge.transfer.ledger import Ledger
from tollbridge.transfer.receive_book import ReceiveBook
from tollbridge.transfer.send_book import SendBook
from tollbridge.transfer.tally import Verdict


@contextmanager
def _deaf_release(kind: str) -> Iterator[None]:
    """One side's connections do not let go of blocks in the middle of a frame."""
    release, settle = Lanes.release, Lanes.settle

    def maybe_release(lanes: Lanes, connection: int, transfer: bytes) -> None:
        if not lanes.first._thread.name.startswith(kind):
            release(lanes, connection, transfer)

    def maybe_settle(lanes: Lanes, connection: int, transfer: bytes) -> None:
        if not lanes.first._thread.name.startswith(kind):
            settle(lanes, connection, transfer)

    with patch.object(Lanes, "release", maybe_release), patch.object(Lanes, "settle", maybe_settle):
        yield


def late_write() -> AbstractContextManager[None]:
    """A transfer ends in the middle of a frame, and the rest of that frame is received into its blocks all the same."""
    return _deaf_release("kv-receive")


def late_read() -> AbstractContextManager[None]:
    """The blocks of a frame that is half sent are taken away, and the rest of it is sent from them all the same."""
    return _deaf_release("kv-send")


@contextmanager
def missed_end() -> Iterator[None]:
    """The transfers of a lost connection are forgotten without a word to the engine."""
    lost = ReceiveBook.lost

    def forget(book: ReceiveBook, connection: int, verdict: Verdict) -> None:
        book._ledger, ledger = SimpleNamespace(end=lambda end: None), book._ledger
        try:
            lost(book, connection, verdict)
        finally:
            book._ledger = ledger

    with patch.object(ReceiveBook, "lost", forget):
        yield


@contextmanager
def missed_deadline() -> Iterator[None]:
    """Prefill waits for ever for a decode worker that never asks."""
    with patch.object(SendBook, "tick", lambda book: None):
        yield


@contextmanager
def second_end() -> Iterator[None]:
    """The engine hears of an end twice."""
    poll = Ledger.poll

    with patch.object(Ledger, "poll", lambda ledger: [end for end in poll(ledger) for _ in range(2)]):
        yield


@contextmanager
def blind_checksum() -> Iterator[None]:
    """A damaged payload is accepted."""
    end_data = ReceiveBook.end_data

    def accept(book: ReceiveBook, connection: int, header: Any, checksum: int, *rest: Any) -> None:
        end_data(book, connection, header, header.payload_checksum, *rest)

    with patch.object(ReceiveBook, "end_data", accept):
        yield


PLANTED: dict[str, tuple[Callable[[], AbstractContextManager[None]], str]] = {
    "late write": (late_write, "were written, and belong to no open load|wrong KV was accepted|though nothing hit it"),
    "late read": (late_read, "failed though nothing hit it"),
    "missed end": (missed_end, "left without an end"),
    "missed deadline": (missed_deadline, "left without an end"),
    "second end": (second_end, "ended twice"),
    "blind checksum": (blind_checksum, "wrong KV was accepted"),
}
