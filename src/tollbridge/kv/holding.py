"""What one worker is thought to hold: blocks it told of, and blocks it is expected to have soon.

*Held* blocks come from its KV events: a block is held while a copy on any medium remains. *Expected* ones come from
what was sent there: the blocks of a prompt that is about to be computed, until the worker tells of them or time is up.
A worker without events has expected blocks only. Both are in the order of their last use, the oldest first.

There may be a million of these records, none of which can be part of a cycle: the garbage collector does not look at
them. A full collection that did was measured to stop the process for 0.2 s at 300,000.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from tollbridge.kv.hashes import BlockHash
from tollbridge.wire.events import EngineHash

Copies = tuple[tuple[str, int], ...]  # (medium, how many), none of them zero
Namespace = tuple[int, int]  # (bytes of a unit, units of a block)


class Block(msgspec.Struct, frozen=True, gc=False):
    """A held block."""

    engine_hash: EngineHash
    namespace: Namespace
    copies: Copies


class Hope(msgspec.Struct, frozen=True, gc=False):
    """An expected block."""

    expires_s: float
    namespace: Namespace


class Holding:
    """The blocks of one worker by our names. Knows nothing of other workers."""

    __slots__ = ("_interned", "bit", "expected", "held", "names")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.held: OrderedDict[BlockHash, Block] = OrderedDict()
        self.names: dict[EngineHash, BlockHash] = {}
        self.expected: OrderedDict[BlockHash, Hope] = OrderedDict()
        self._interned: dict[Copies, Copies] = {}  # nearly every block has the same: one copy on the GPU

    def __len__(self) -> int:
        """Return the entries that memory is spent on; a block that is held and expected counts twice."""
        return len(self.held) + len(self.expected)

    def __contains__(self, name: BlockHash) -> bool:
        return name in self.held or name in self.expected

    def store(self, name: BlockHash, engine_hash: EngineHash, namespace: Namespace, medium: str) -> None:
        """Add a copy, and stop expecting it."""
        self.expected.pop(name, None)
        block = self.held.get(name)
        copies = _with(block.copies if block else (), medium, 1)
        if block is not None and block.engine_hash != engine_hash:
            self.names.pop(block.engine_hash, None)
        self.held[name] = Block(engine_hash, namespace, self._interned.setdefault(copies, copies))
        self.held.move_to_end(name)
        self.names[engine_hash] = name

    def remove(self, engine_hash: EngineHash, medium: str) -> tuple[BlockHash, Block] | None:
        """Remove a copy; return the block when it was the last. KeyError when there is no such copy."""
        name = self.names[engine_hash]
        block = self.held[name]
        copies = _with(block.copies, medium, -1)
        if not copies:
            return name, self.drop(name)
        self.held[name] = Block(block.engine_hash, block.namespace, self._interned.setdefault(copies, copies))
        return None

    def drop(self, name: BlockHash) -> Block:
        """Forget a held block with all its copies."""
        block = self.held.pop(name)
        del self.names[block.engine_hash]
        return block

    def touch(self, names: list[BlockHash]) -> None:
        """Note that these were used; the head of a prefix is the last to be forgotten, for a tail alone is no use."""
        for name in reversed(names):
            if name in self.held:
                self.held.move_to_end(name)
            if name in self.expected:
                self.expected.move_to_end(name)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert {block.engine_hash: name for name, block in self.held.items()} == self.names, "names and blocks differ"
        assert all(block.copies for block in self.held.values()), "a block without a copy"
        assert all(number > 0 for block in self.held.values() for _, number in block.copies)


def _with(copies: Copies, medium: str, change: int) -> Copies:
    """Return `copies` with one more or less on `medium`; KeyError when there is none to take away."""
    numbers = dict(copies)
    number = numbers.pop(medium, 0) + change
    if number < 0:
        raise KeyError(medium)
    if number:
        numbers[medium] = number
    return tuple(sorted(numbers.items()))
