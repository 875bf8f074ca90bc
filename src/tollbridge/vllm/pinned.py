"""Sends whose request has ended and whose blocks are still held for them, oldest first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tollbridge.vllm.orders import ShedOrder


class Pinned:
    """By request id, until the worker reports the end. `max_blocks` is the bound, 0 for none."""

    def __init__(self, max_blocks: int = 0) -> None:
        self.max_blocks = max_blocks
        self._sends: dict[str, tuple[str, tuple[int, ...]]] = {}  # request id -> (transfer id, its blocks)
        self._held: Counter[int] = Counter()  # block -> sends that hold it: they may share a prefix

    def __len__(self) -> int:
        return len(self._sends)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._sends

    @property
    def num_blocks(self) -> int:
        """Distinct blocks."""
        return len(self._held)

    @property
    def transfer_ids(self) -> tuple[str, ...]:
        return tuple(transfer_id for transfer_id, _ in self._sends.values())

    def add(self, request_id: str, transfer_id: str, blocks: Sequence[int]) -> None:
        self._sends[request_id] = transfer_id, tuple(blocks)
        self._held.update(set(blocks))

    def remove(self, request_id: str) -> str:
        """Forget a send, if it is there; return its transfer id."""
        transfer_id, blocks = self._sends.pop(request_id, ("", ()))
        self._held.subtract(set(blocks))
        for block in blocks:
            if self._held[block] <= 0:
                del self._held[block]
        return transfer_id

    def maybe_request(self, transfer_id: str) -> str | None:
        """Return the request id of a transfer."""
        return next((request for request, (own, _) in self._sends.items() if own == transfer_id), None)

    def over_bound(self) -> ShedOrder | None:
        """Return the order to give up what exceeds the bound, what decode has not opened first."""
        if not 0 < self.max_blocks < self.num_blocks:
            return None
        return ShedOrder(transfer_ids=self.transfer_ids, max_blocks=self.max_blocks, unsent_too=True)

    def make_room(self) -> ShedOrder | None:
        """Return the order to give up one send that decode has not opened: others wait for its blocks."""
        if not self._sends:
            return None
        return ShedOrder(transfer_ids=self.transfer_ids, max_blocks=self.num_blocks - 1, unsent_too=False)

    def check(self) -> None:
        """Raise AssertionError when the count of blocks is wrong."""
        held = Counter(block for _, blocks in self._sends.values() for block in set(blocks))
        assert held == self._held, "pinned blocks are miscounted"
