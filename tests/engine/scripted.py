"""A sender and a receiver that do nothing but record, and end transfers when a test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from tests.engine.fakes import TIMEOUT_S
from tollbridge.transfer.base import LoadRequest, Published, TransferEnd


class Script:
    """Calls in order, as tuples that start with the method's name; ends to be polled."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.closed = False
        self._ends: list[TransferEnd] = []
        self._open: set[str] = set()
        self._notify: Callable[[], None] = lambda: None
        self._changed = threading.Condition()

    def set_listener(self, notify: Callable[[], None]) -> None:
        self._notify = notify

    def poll(self) -> list[TransferEnd]:
        with self._changed:
            ends, self._ends = self._ends, []
            return ends

    def end(self, transfer_id: str, outcome: Any, **fields: Any) -> None:
        with self._changed:
            if transfer_id not in self._open:
                return
            self._open.remove(transfer_id)
            side: Any = "send" if isinstance(self, ScriptedSender) else "receive"
            self._ends.append(TransferEnd(transfer_id=transfer_id, side=side, outcome=outcome, **fields))
        self._notify()

    def wait(self, *call: Any) -> tuple[Any, ...]:
        """Return the first call that starts like `call`, once it was made."""

        def find() -> tuple[Any, ...] | None:
            return next((made for made in self.calls if made[: len(call)] == call), None)

        with self._changed:
            assert self._changed.wait_for(find, TIMEOUT_S), f"{call} was never called: {self.calls}"
            found = find()
            assert found is not None
            return found

    def names(self, transfer_id: str) -> list[str]:
        return [call[0] for call in self.calls if call[1] == transfer_id]

    def cancel(self, transfer_id: str, detail: str) -> None:
        self._record("cancel", transfer_id, detail)

    def check(self) -> None: ...

    def close(self) -> None:
        self.closed = True
        for transfer_id in list(self._open):
            self.end(transfer_id, "cancelled", reason="shutdown")

    def statistics(self) -> Any:
        raise NotImplementedError

    def _record(self, *call: Any) -> None:
        with self._changed:
            assert not self.closed
            self.calls.append(call)
            self._changed.notify_all()


class ScriptedSender(Script):
    address = ("127.0.0.1", 1)

    def register(self, transfer_id: str, *, digest: bytes, num_tokens: int) -> None:
        self._open.add(transfer_id)
        self._record("register", transfer_id, digest, num_tokens)

    def publish(
        self, transfer_id: str, block_table: Sequence[int], num_tokens: int, *, layer: int | None = None
    ) -> None:
        self._record("publish", transfer_id, tuple(block_table), num_tokens, layer)

    def shed(self, transfer_ids: Sequence[str], max_blocks: int, *, unsent_too: bool) -> None:
        self._record("shed", tuple(transfer_ids), max_blocks, unsent_too)

    def publish_all(self, chunks: Sequence[Published], *, layer: int | None = None) -> None:
        for chunk in chunks:
            self.publish(*chunk, layer=layer)

    def rewind(self, transfer_id: str) -> None:
        self._record("rewind", transfer_id)


class ScriptedReceiver(Script):
    def open(self, load: LoadRequest) -> None:
        self._open.add(load.transfer_id)
        self._record("open", load.transfer_id, load)
