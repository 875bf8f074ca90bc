"""The blocks of the paged KV cache: who holds them, and which prefixes they hold.

A block is in exactly one of three places:
  * held: its reference count is positive; one reference for each block table that names it;
  * evictable: nobody holds it and it is in the prefix cache; kept in the order in which it is to be evicted;
  * blank: nobody holds it and it holds nothing of value.

A block enters the prefix cache by `commit`, when its KV *has been computed* (or loaded and accepted). The alternative,
naming blocks when they are scheduled as vLLM does, lets a hit refer to KV that another request is still computing;
whoever ships a hit to another worker would then have to wait for that request.
A committed block is never written again until it is evicted, so sharing needs no copy on write.
Two blocks may hold the same content (two equal prompts computed side by side); each is a copy of its own.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from tollbridge.kv.eventlog import EventLog
from tollbridge.kv.hashes import BlockHash, event_hash
from tollbridge.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, EngineHash, KVEvent


@dataclass(frozen=True, kw_only=True)
class PoolStatistics:
    """Gauges of now, and counters since start (`*_total`). All in blocks."""

    num_blocks: int
    num_free: int  # blank or evictable
    num_cached: int  # in the prefix cache, held or evictable; copies count
    committed_total: int
    evicted_total: int
    num_event_overflows: int


class BlockPool:
    """Reference-counted blocks with a prefix cache and least-recently-used eviction."""

    def __init__(self, num_blocks: int, block_size: int, *, event_capacity: int = 16_384) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks  # of each block in the prefix cache
        self._copies: dict[BlockHash, dict[int, None]] = {}  # the prefix cache; the oldest copy first
        self._blank = list(range(num_blocks - 1, -1, -1))  # a stack
        self._evictable: OrderedDict[int, None] = OrderedDict()  # the next to be evicted first
        self._events = EventLog(event_capacity)
        self._committed_total = 0
        self._evicted_total = 0

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give now."""
        return len(self._blank) + len(self._evictable)

    def num_free_without(self, block_ids: Sequence[int]) -> int:
        """Return what `allocate` could give after `acquire(block_ids)`."""
        return self.num_free - sum(1 for block in block_ids if not self._references[block])

    def lookup(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Return blocks that hold the longest cached prefix of `hashes`; they are not held yet."""
        found: list[int] = []
        for value in hashes:
            copies = self._copies.get(value)
            if copies is None:
                break
            found.append(next(iter(copies)))
        return found

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each of these cached blocks."""
        for block in block_ids:
            if not self._references[block]:
                del self._evictable[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with one reference each, blank ones first, then evicted ones."""
        assert count <= self.num_free, f"{count} blocks asked of a pool that has {self.num_free}"
        num_blank = min(count, len(self._blank))
        blocks = [self._blank.pop() for _ in range(num_blank)]
        blocks += self._evict(count - num_blank)
        for block in blocks:
            self._references[block] = 1
        return blocks

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop a reference to each block of a table.

        The last block goes first, so that the tail of a prefix is evicted before its head: a tail without its head
        can never be hit.
        """
        for block in reversed(block_ids):
            references = self._references[block] = self._references[block] - 1
            assert references >= 0, f"block {block} was released more often than held"
            if references:
                continue
            if self._hashes[block] is None:
                self._blank.append(block)
            else:
                self._evictable[block] = None

    def commit(
        self,
        block_ids: Sequence[int],
        hashes: Sequence[BlockHash],
        *,
        parent: BlockHash | None,
        token_ids: Sequence[int],
        cache_salt: str | None = None,
    ) -> None:
        """Enter consecutive full blocks, whose KV is in memory, into the prefix cache.

        `parent` names the block before them (None: they start a sequence); `token_ids` are theirs, in order. The
        blocks must be held and not in the prefix cache. `cache_salt` is that of the sequence.
        """
        for block, value in zip(block_ids, hashes, strict=True):
            assert self._references[block] and self._hashes[block] is None, f"block {block} cannot be committed"
            self._hashes[block] = value
            self._copies.setdefault(value, {})[block] = None
        self._committed_total += len(block_ids)
        self._events.append(
            BlockStored(
                block_hashes=[event_hash(value) for value in hashes],
                parent_block_hash=None if parent is None else event_hash(parent),
                token_ids=list(token_ids),
                block_size=self.block_size,
                extra_keys=_extra_keys(len(hashes), cache_salt) if parent is None else None,
            )
        )

    def clear(self) -> None:
        """Drop the prefix cache. Blocks that are held stay held, without a name."""
        self._copies.clear()
        self._hashes = [None] * self.num_blocks
        self._blank.extend(self._evictable)
        self._evictable.clear()
        self._events.append(AllBlocksCleared())

    def take_events(self) -> list[KVEvent]:
        """Return the events since the last call."""
        return self._events.take()

    def statistics(self) -> PoolStatistics:
        return PoolStatistics(
            num_blocks=self.num_blocks,
            num_free=self.num_free,
            num_cached=sum(map(len, self._copies.values())),
            committed_total=self._committed_total,
            evicted_total=self._evicted_total,
            num_event_overflows=self._events.num_overflows,
        )

    def check(self, tables: Sequence[Sequence[int]] | None = None) -> None:
        """Raise AssertionError when an invariant is broken; `tables` are all the block tables that hold references."""
        blank, evictable = set(self._blank), set(self._evictable)
        held = {block for block, references in enumerate(self._references) if references}
        assert len(blank) == len(self._blank), "a block is blank twice"
        assert not blank & evictable and not held & (blank | evictable), "a block is in two places"
        assert len(blank) + len(evictable) + len(held) == self.num_blocks, "a block is lost"
        assert all(self._hashes[block] is None for block in blank), "a blank block has a name"
        named = {block: value for block, value in enumerate(self._hashes) if value is not None}
        assert evictable <= set(named), "an evictable block has no name"
        mapped = {block: value for value, copies in self._copies.items() for block in copies}
        assert mapped == named and all(self._copies.values()), "prefix cache and block names differ"
        if tables is not None:
            counts = Counter(block for table in tables for block in table)
            wrong = [block for block, references in enumerate(self._references) if references != counts[block]]
            assert not wrong, f"references of blocks {wrong} differ from the block tables"

    def _evict(self, count: int) -> list[int]:
        if not count:
            return []
        blocks = [self._evictable.popitem(last=False)[0] for _ in range(count)]
        removed: list[EngineHash] = []
        for block in blocks:
            value = self._hashes[block]
            assert value is not None
            self._hashes[block] = None
            copies = self._copies[value]
            del copies[block]
            if not copies:
                del self._copies[value]
            removed.append(event_hash(value))
        self._evicted_total += count
        self._events.append(BlockRemoved(block_hashes=removed))
        return blocks


def _extra_keys(num_blocks: int, cache_salt: str | None) -> list[list[str] | None] | None:
    """Return what else the first block was named by, in the form that KV events have."""
    return [[cache_salt], *[None] * (num_blocks - 1)] if cache_salt else None
