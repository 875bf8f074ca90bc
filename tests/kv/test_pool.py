from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tollbridge.kv.hashes import BlockHash, event_hash, prompt_hashes
from tollbridge.kv.pool import BlockPool
from tollbridge.wire.events import AllBlocksCleared, BlockRemoved, BlockStored

SIZE = 2


def hashes_of(*tokens: int) -> list[BlockHash]:
    return prompt_hashes(tokens, SIZE)


def commit(pool: BlockPool, blocks: list[int], *tokens: int) -> list[BlockHash]:
    hashes = hashes_of(*tokens)
    pool.commit(blocks, hashes, parent=None, token_ids=tokens)
    return hashes


def test_allocate_and_release() -> None:
    pool = BlockPool(4, SIZE)
    blocks = pool.allocate(3)
    assert len(set(blocks)) == 3 and pool.num_free == 1
    pool.check([blocks])
    pool.release(blocks)
    assert pool.num_free == 4
    pool.check([])


def test_a_committed_block_is_found_held_and_free() -> None:
    pool = BlockPool(4, SIZE)
    blocks = pool.allocate(2)
    assert pool.lookup(hashes_of(1, 2, 3, 4)) == []
    hashes = commit(pool, blocks, 1, 2, 3, 4)
    assert pool.lookup(hashes) == blocks
    pool.release(blocks)
    assert pool.lookup(hashes) == blocks and pool.num_free == 4
    assert pool.num_free_without(blocks) == 2
    pool.acquire(blocks)
    pool.acquire(blocks)
    pool.check([blocks, blocks])
    assert pool.num_free == 2 == pool.num_free_without(blocks)


def test_lookup_stops_at_the_first_gap() -> None:
    pool = BlockPool(4, SIZE)
    blocks = pool.allocate(3)
    hashes = commit(pool, blocks, 1, 2, 3, 4, 5, 6)
    assert pool.lookup([hashes[0], b"?" * 16, hashes[2]]) == blocks[:1]


def test_blank_blocks_go_before_cached_ones_and_tails_before_heads() -> None:
    pool = BlockPool(5, SIZE)
    old, new = pool.allocate(2), pool.allocate(2)
    old_hashes, new_hashes = commit(pool, old, 1, 2, 3, 4), commit(pool, new, 5, 6, 7, 8)
    pool.release(old)
    pool.release(new)
    pool.allocate(1)
    assert pool.statistics().num_cached == 4
    pool.allocate(1)
    assert pool.lookup(old_hashes) == old[:1]
    pool.allocate(2)
    assert pool.lookup(old_hashes) == [] and pool.lookup(new_hashes) == new[:1]
    assert pool.statistics().evicted_total == 3


def test_a_hit_makes_a_block_young_again() -> None:
    pool = BlockPool(2, SIZE)
    one, two = pool.allocate(1), pool.allocate(1)
    one_hash, two_hash = commit(pool, one, 1, 2), commit(pool, two, 3, 4)
    pool.release(one)
    pool.release(two)
    pool.acquire(one)
    pool.release(one)
    pool.allocate(1)
    assert pool.lookup(one_hash) == one and pool.lookup(two_hash) == []


def test_copies_of_the_same_content_are_tolerated() -> None:
    pool = BlockPool(3, SIZE)
    one, two = pool.allocate(1), pool.allocate(1)
    hashes = commit(pool, one, 1, 2)
    commit(pool, two, 1, 2)
    assert pool.lookup(hashes) == one
    pool.release(one)
    pool.allocate(2)
    assert pool.lookup(hashes) == two
    assert [type(event) for event in pool.take_events()] == [BlockStored, BlockStored, BlockRemoved]


def test_events_tell_parent_tokens_and_hashes() -> None:
    pool = BlockPool(4, SIZE)
    blocks = pool.allocate(3)
    hashes = hashes_of(1, 2, 3, 4, 5, 6)
    pool.commit(blocks[:1], hashes[:1], parent=None, token_ids=(1, 2))
    pool.commit(blocks[1:], hashes[1:], parent=hashes[0], token_ids=(3, 4, 5, 6))
    pool.release(blocks)
    pool.allocate(2)
    names = [event_hash(value) for value in hashes]
    assert pool.take_events() == [
        BlockStored(block_hashes=names[:1], parent_block_hash=None, token_ids=[1, 2], block_size=SIZE),
        BlockStored(block_hashes=names[1:], parent_block_hash=names[0], token_ids=[3, 4, 5, 6], block_size=SIZE),
        BlockRemoved(block_hashes=names[2:]),
    ]


def test_clear_forgets_names_but_not_holders() -> None:
    pool = BlockPool(4, SIZE)
    held, free = pool.allocate(1), pool.allocate(1)
    hashes = [*commit(pool, held, 1, 2), *commit(pool, free, 3, 4)]
    pool.release(free)
    pool.clear()
    assert [pool.lookup([value]) for value in hashes] == [[], []]
    assert pool.num_free == 3
    pool.check([held])
    assert pool.take_events()[-1] == AllBlocksCleared()


def test_misuse_is_found() -> None:
    pool = BlockPool(2, SIZE)
    blocks = pool.allocate(1)
    with pytest.raises(AssertionError, match="2 blocks asked"):
        pool.allocate(2)
    commit(pool, blocks, 1, 2)
    with pytest.raises(AssertionError, match="cannot be committed"):
        commit(pool, blocks, 1, 2)
    with pytest.raises(AssertionError, match="differ from the block tables"):
        pool.check([])
    pool.release(blocks)
    with pytest.raises(AssertionError, match="more often than held"):
        pool.release(blocks)


class PoolMachine(RuleBasedStateMachine):
    """Tables of chains over a tiny alphabet, so that hits, copies and evictions are frequent.

    `index` is what a listener that follows the events believes; it must be what the pool holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8, SIZE)
        self.tables: list[tuple[list[int], list[BlockHash], int]] = []  # blocks, hashes, committed
        self.index: dict[int, int] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=SIZE, max_size=5 * SIZE))
    def admit(self, tokens: list[int]) -> None:
        hashes = prompt_hashes(tokens, SIZE)
        hits = self.pool.lookup(hashes)
        num_new = len(hashes) - len(hits)
        free = self.pool.num_free_without(hits)
        if num_new > free:
            return
        self.pool.acquire(hits)
        assert self.pool.num_free == free
        new = self.pool.allocate(num_new)
        assert not set(new) & {block for table, _, _ in self.tables for block in table}
        self.tables.append((hits + new, hashes, len(hits)))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        blocks, hashes, first = self.tables[index]
        last = data.draw(st.integers(first, len(blocks)))
        if first < last:
            parent = hashes[first - 1] if first else None
            self.pool.commit(
                blocks[first:last], hashes[first:last], parent=parent, token_ids=[0] * SIZE * (last - first)
            )
            self.tables[index] = (blocks, hashes, last)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks, _, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(blocks)

    @rule()
    def follow_events(self) -> None:
        for event in self.pool.take_events():
            if isinstance(event, BlockStored):
                for value in event.block_hashes:
                    self.index[value] = self.index.get(value, 0) + 1
            elif isinstance(event, BlockRemoved):
                for value in event.block_hashes:
                    self.index[value] -= 1
            else:
                self.index.clear()
        assert sum(self.index.values()) == self.pool.statistics().num_cached

    @invariant()
    def holds(self) -> None:
        self.pool.check([blocks for blocks, _, _ in self.tables])
        for blocks, hashes, committed in self.tables:
            assert len(self.pool.lookup(hashes)) >= committed
            assert len(set(blocks)) == len(blocks)

    def teardown(self) -> None:
        for blocks, _, _ in self.tables:
            self.pool.release(blocks)
        self.pool.check([])
        assert self.pool.num_free == 8


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_events_name_the_salt_of_a_first_block() -> None:
    pool = BlockPool(4, 2)
    salted = prompt_hashes([1, 2, 3, 4], 2, cache_salt="s")
    blocks = pool.allocate(2)
    pool.commit(blocks[:1], salted[:1], parent=None, token_ids=[1, 2], cache_salt="s")
    pool.commit(blocks[1:], salted[1:], parent=salted[0], token_ids=[3, 4], cache_salt="s")
    first, second = pool.take_events()
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    assert (first.extra_keys, second.extra_keys) == ([["s"]], None)
