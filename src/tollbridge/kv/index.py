"""The prefix index: how much of a prompt each worker has in its cache. A hint, never truth.

Blocks are named by our own hash chain over what they were computed from (`kv/hashes.py`), so workers with different
hash functions, seeds and block sizes share one index; a worker's own names are kept to follow its removals and parents.
For each name there is one bit per worker: a lookup walks the prompt's chain and intersects the bits, so it costs one
hash and one dictionary access per cached block, however many workers there are, and ends where nobody has the next.

What the index knows is less than what is cached (events were lost, or it forgot, being bounded) or, for a moment, more
(an eviction is on its way). It never raises for a strange event: it counts it. Not thread-safe; no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tollbridge.kv.content import TOKEN_BYTES, Prompted, extra_of, keys_of, root_of
from tollbridge.kv.hashes import ROOT, BlockHash, pack, packed_hash
from tollbridge.kv.holding import Holding, Hope, Namespace
from tollbridge.wire.events import EngineHash

DEFAULT_MEDIUM = "GPU"  # of an event that does not say


@dataclass(frozen=True, kw_only=True)
class IndexStatistics:
    """Gauges of now in blocks, a block of two workers counting twice; counters since start (`*_total`)."""

    num_workers: int
    num_held: int
    num_expected: int
    num_distinct: int
    stored_total: int
    removed_total: int
    orphans_total: int  # stored after a parent that is not known: an event was missed, or the parent forgotten
    strays_total: int  # removed, but not known
    unusable_total: int  # stored events that do not say which tokens their blocks hold
    forgotten_total: int  # dropped because of the bounds
    expired_total: int  # expected in vain
    clears_total: int


class PrefixIndex:
    """See the top of the file. The bounds are in entries: blocks held or expected, summed over workers."""

    def __init__(self, *, max_entries: int = 1 << 20, max_entries_per_worker: int = 1 << 18) -> None:
        self._max_entries = max_entries
        self._max_per_worker = max_entries_per_worker
        self._holdings: dict[str, Holding] = {}
        self._workers: dict[int, str] = {}  # by bit
        self._masks: dict[BlockHash, int] = {}  # the bits of the workers that hold or expect it
        self._namespaces: Counter[Namespace] = Counter()  # blocks in each, by worker
        self._num_entries = 0
        self._totals: Counter[str] = Counter()

    # --- reading

    def match(self, content: Prompted) -> dict[str, int]:
        """Return how many leading units of `content` each worker has; absent workers have none."""
        found: dict[str, int] = {}
        for unit_bytes, block_size in self._namespaces:
            if unit_bytes == content.unit_bytes:
                self._match(content, block_size, found)
        return found

    def _match(self, content: Prompted, block_size: int, found: dict[str, int]) -> None:
        masks, alive, depth = self._masks, -1, 0
        for name in content.hashes(block_size):
            mask = masks.get(name, 0)
            if alive & mask != alive:  # somebody does not have this one
                if alive != -1:
                    self._note(alive & ~mask, depth, found)
                alive &= mask
                if not alive:
                    return
            depth += block_size
        if alive != -1:
            self._note(alive, depth, found)

    def _note(self, bits: int, depth: int, found: dict[str, int]) -> None:
        while bits:
            bit = bits & -bits
            worker = self._workers[bit]
            found[worker] = max(depth, found.get(worker, 0))
            bits ^= bit

    # --- what workers tell

    def stored(
        self,
        worker: str,
        *,
        block_hashes: Sequence[EngineHash],
        parent: EngineHash | None,
        token_ids: Sequence[int],
        block_size: int,
        medium: str | None = None,
        lora: str | None = None,
        extra_keys: Sequence[Sequence[Any] | None] | None = None,
    ) -> None:
        """Full blocks entered a worker's cache: `block_hashes` in order, after `parent`, holding `token_ids`."""
        if block_size < 1 or len(token_ids) != len(block_hashes) * block_size:
            self._totals["unusable"] += len(block_hashes)
            return
        holding = self._holding(worker)
        name = ROOT if parent is None else holding.names.get(parent)
        if name is None:
            self._totals["orphans"] += len(block_hashes)
            return
        packed, step = pack(token_ids), TOKEN_BYTES * block_size
        for at, engine_hash in enumerate(block_hashes):
            keys = keys_of(extra_keys[at] if extra_keys and at < len(extra_keys) else None, lora)
            extra = root_of(lora, keys) if name is ROOT else extra_of(keys)
            name = packed_hash(name, packed[at * step : (at + 1) * step], extra)
            self._store(holding, name, engine_hash, (TOKEN_BYTES, block_size), medium or DEFAULT_MEDIUM)
        self._totals["stored"] += len(block_hashes)
        self._keep_bounds(holding)

    def removed(self, worker: str, block_hashes: Sequence[EngineHash], *, medium: str | None = None) -> None:
        """A copy of each was evicted; another may remain."""
        holding = self._holding(worker)
        for engine_hash in block_hashes:
            try:
                gone = holding.remove(engine_hash, medium or DEFAULT_MEDIUM)
            except KeyError:
                self._totals["strays"] += 1
                continue
            self._totals["removed"] += 1
            if gone is not None:
                self._num_entries -= 1
                name, block = gone
                self._unmark(holding, name, block.namespace)

    def clear(self, worker: str) -> None:
        """The worker dropped its cache, or is another process now, or can no longer be followed."""
        self._totals["clears"] += 1
        holding = self._holding(worker)
        for name in list(holding.held):
            self._forget(holding, name)
        for name in list(holding.expected):
            self._stop_expecting(holding, name)

    def forget_worker(self, worker: str) -> None:
        """Drop a worker that is no longer part of the fleet."""
        self.clear(worker)
        holding = self._holdings.pop(worker)
        del self._workers[holding.bit]

    # --- what was sent

    def expect(
        self, worker: str, content: Prompted, block_size: int, *, expires_s: float, most: int | None = None
    ) -> None:
        """The worker is about to compute `content`: count it as cached until `expires_s`, or until it tells.

        What is there already counts as used. `expires_s` must not go down from call to call for one worker. Of a worker
        that never tells what it evicts, `most` blocks are expected, those that were used last.
        """
        holding = self._holding(worker)
        names = list(content.hashes(block_size))[: self._max_per_worker]
        namespace = (content.unit_bytes, block_size)
        for name in names:
            if name in holding.held:
                continue
            if name not in holding.expected:
                self._num_entries += 1
                self._mark(holding, name, namespace)
            holding.expected[name] = Hope(expires_s, namespace)
        holding.touch(names)
        while most is not None and len(holding.expected) > most:
            self._totals["forgotten"] += 1
            self._stop_expecting(holding, next(iter(holding.expected)))
        self._keep_bounds(holding)

    def expire(self, now_s: float) -> None:
        """Stop expecting what is overdue."""
        for holding in self._holdings.values():
            while holding.expected:
                name, hope = next(iter(holding.expected.items()))
                if hope.expires_s > now_s:
                    break
                self._totals["expired"] += 1
                self._stop_expecting(holding, name)

    # --- seeing

    def statistics(self) -> IndexStatistics:
        holdings = self._holdings.values()
        totals = ("stored", "removed", "orphans", "strays", "unusable", "forgotten", "expired", "clears")
        return IndexStatistics(
            num_workers=len(holdings),
            num_held=sum(len(holding.held) for holding in holdings),
            num_expected=sum(len(holding.expected) for holding in holdings),
            num_distinct=len(self._masks),
            **{f"{name}_total": self._totals[name] for name in totals},
        )

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken. Slow."""
        masks: dict[BlockHash, int] = {}
        namespaces: Counter[Namespace] = Counter()
        for holding in self._holdings.values():
            holding.check()
            entries = [(name, hope.namespace) for name, hope in holding.expected.items()]
            entries += [(name, block.namespace) for name, block in holding.held.items()]
            for name, namespace in entries:
                masks[name] = masks.get(name, 0) | holding.bit
                namespaces[namespace] += 1
            assert not holding.held.keys() & holding.expected.keys(), "a held block is still expected"
            assert len(holding) <= self._max_per_worker, "a worker is over its bound"
        assert masks == self._masks, "bits and blocks differ"
        assert namespaces == self._namespaces and all(namespaces.values()), "namespaces and blocks differ"
        assert self._num_entries == sum(map(len, self._holdings.values())) <= self._max_entries

    # --- inside

    def _holding(self, worker: str) -> Holding:
        holding = self._holdings.get(worker)
        if holding is None:
            bit = next(1 << at for at in range(len(self._workers) + 1) if 1 << at not in self._workers)
            holding = self._holdings[worker] = Holding(bit)
            self._workers[bit] = worker
        return holding

    def _store(
        self, holding: Holding, name: BlockHash, engine_hash: EngineHash, namespace: Namespace, medium: str
    ) -> None:
        if name not in holding:
            self._num_entries += 1
            self._mark(holding, name, namespace)
        holding.store(name, engine_hash, namespace, medium)

    def _mark(self, holding: Holding, name: BlockHash, namespace: Namespace) -> None:
        self._masks[name] = self._masks.get(name, 0) | holding.bit
        self._namespaces[namespace] += 1

    def _unmark(self, holding: Holding, name: BlockHash, namespace: Namespace) -> None:
        rest = self._masks[name] & ~holding.bit
        if rest:
            self._masks[name] = rest
        else:
            del self._masks[name]
        self._namespaces[namespace] -= 1
        if not self._namespaces[namespace]:
            del self._namespaces[namespace]

    def _forget(self, holding: Holding, name: BlockHash) -> None:
        self._num_entries -= 1
        self._unmark(holding, name, holding.drop(name).namespace)

    def _stop_expecting(self, holding: Holding, name: BlockHash) -> None:
        self._num_entries -= 1
        self._unmark(holding, name, holding.expected.pop(name).namespace)

    def _keep_bounds(self, holding: Holding) -> None:
        """Forget the oldest blocks: of this worker while it is over its bound, then of whoever has most."""
        while len(holding) > self._max_per_worker:
            self._forget_oldest(holding)
        while self._num_entries > self._max_entries:
            self._forget_oldest(max(self._holdings.values(), key=len))

    def _forget_oldest(self, holding: Holding) -> None:
        self._totals["forgotten"] += 1
        if len(holding.expected) > len(holding.held):
            self._stop_expecting(holding, next(iter(holding.expected)))
        else:
            self._forget(holding, next(iter(holding.held)))
