"""The prefix index against a model that remembers everything and computes nothing cleverly."""

from __future__ import annotations

import gc
import json
import random
import struct
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tollbridge.kv.content import Content, LongIds, root_of
from tollbridge.kv.index import PrefixIndex

LONG = list(range(100, 164))  # four blocks of 16


def names(tokens: list[int], size: int = 16, seed: str = "") -> list[int]:
    """Return an engine's own hashes: anything, as long as equal prefixes have equal ones."""
    rng = random.Random()
    values = []
    for end in range(size, len(tokens) + 1, size):
        rng.seed(f"{seed}{tokens[:end]}")
        values.append(rng.getrandbits(64))
    return values


def store(
    index: PrefixIndex, worker: str, tokens: list[int], *, first: int = 0, size: int = 16, **more: object
) -> None:
    """Tell of the blocks of `tokens` from block `first` on."""
    hashes = names(tokens, size, worker)
    end = len(tokens) // size * size
    index.stored(
        worker,
        block_hashes=hashes[first:],
        parent=hashes[first - 1] if first else None,
        token_ids=tokens[first * size : end],
        block_size=size,
        **more,  # type: ignore[arg-type]
    )


def match(index: PrefixIndex, tokens: list[int], **more: str) -> dict[str, int]:
    index.check()
    return index.match(Content.of_tokens(tokens, **more))


def test_the_longest_prefix_of_each_worker() -> None:
    index = PrefixIndex()
    store(index, "a", LONG)
    store(index, "b", LONG[:32] + [1] * 32)
    assert match(index, LONG) == {"a": 64, "b": 32}
    assert match(index, LONG[:40]) == {"a": 32, "b": 32}
    assert match(index, LONG[:15]) == {}
    assert match(index, [5, *LONG]) == {}


def test_workers_of_different_block_sizes_share_the_index() -> None:
    index = PrefixIndex()
    store(index, "a", LONG, size=16)
    store(index, "b", LONG, size=24)
    assert match(index, LONG) == {"a": 64, "b": 48}


def test_chunks_follow_their_parents() -> None:
    index = PrefixIndex()
    store(index, "a", LONG[:32])
    store(index, "a", LONG, first=2)
    assert match(index, LONG) == {"a": 64}


def test_a_missed_event_is_counted_and_does_no_harm() -> None:
    index = PrefixIndex()
    store(index, "a", LONG, first=2)
    assert match(index, LONG) == {}
    assert index.statistics().orphans_total == 2
    store(index, "a", LONG)
    assert match(index, LONG) == {"a": 64}


def test_events_that_do_not_add_up_are_counted() -> None:
    index = PrefixIndex()
    index.stored("a", block_hashes=[1, 2], parent=None, token_ids=[1] * 16, block_size=16)
    index.stored("a", block_hashes=[1], parent=None, token_ids=[], block_size=0)
    index.removed("a", [77])
    assert match(index, [1] * 16) == {}
    assert (index.statistics().unusable_total, index.statistics().strays_total) == (3, 1)


def test_a_removal_while_a_copy_remains() -> None:
    index = PrefixIndex()
    store(index, "a", LONG)
    store(index, "a", LONG[:16])  # computed a second time, side by side
    store(index, "a", LONG[:16], medium="CPU")
    head = names(LONG, seed="a")[0]
    for medium, left in [("GPU", 64), ("CPU", 64), ("CPU", 64), ("GPU", 0)]:
        index.removed("a", [head], medium=medium)
        assert match(index, LONG).get("a", 0) == left
    assert index.statistics().strays_total == 1, "there was one copy on the CPU"


def test_hashes_may_be_bytes() -> None:
    index = PrefixIndex()
    index.stored("a", block_hashes=[b"x" * 32, b"y" * 32], parent=None, token_ids=LONG[:32], block_size=16)
    index.removed("a", [b"y" * 32])
    assert match(index, LONG) == {"a": 16}


def test_salt_and_adapter_keep_prompts_apart() -> None:
    index = PrefixIndex()
    store(index, "plain", LONG)
    store(index, "salted", LONG, extra_keys=[("s",), None, None, None])
    store(index, "adapted", LONG, lora="l", extra_keys=[("l",)] * 4)
    store(index, "both", LONG, lora="l", extra_keys=[("l", "s"), ("l",), ("l",), ("l",)])
    assert match(index, LONG) == {"plain": 64}
    assert match(index, LONG, salt="s") == {"salted": 64}
    assert match(index, LONG, lora="l") == {"adapted": 64}
    assert match(index, LONG, lora="l", salt="s") == {"both": 64}


def test_pictures_end_the_match_of_a_text() -> None:
    index = PrefixIndex()
    store(index, "a", LONG, extra_keys=[None, None, (("picture", 3),), None])
    assert match(index, LONG) == {"a": 32}


def test_clear_and_forget() -> None:
    index = PrefixIndex()
    for worker in "ab":
        store(index, worker, LONG)
    index.expect("a", Content.of_tokens([9] * 32), 16, expires_s=1.0)
    index.clear("a")
    assert match(index, LONG) == {"b": 64}
    index.forget_worker("b")
    assert match(index, LONG) == {}
    assert index.statistics().num_distinct == 0
    store(index, "c", LONG)
    assert match(index, LONG) == {"c": 64}


def test_what_was_sent_is_expected_until_it_is_told_of_or_time_is_up() -> None:
    index = PrefixIndex()
    index.expect("a", Content.of_tokens(LONG), 16, expires_s=10.0)
    index.expect("b", Content.of_tokens(LONG), 16, expires_s=20.0)
    assert match(index, LONG) == {"a": 64, "b": 64}
    store(index, "a", LONG[:32])
    index.expire(10.0)
    assert match(index, LONG) == {"a": 32, "b": 64}
    index.expect("b", Content.of_tokens(LONG[:16]), 16, expires_s=30.0)
    index.expire(29.0)
    assert match(index, LONG) == {"a": 32, "b": 16}


def test_text_has_a_namespace_of_its_own() -> None:
    index = PrefixIndex()
    text = b"You are a helpful toll collector. " * 8
    index.expect("a", Content.of_text(text), 64, expires_s=1.0)
    assert index.match(Content.of_text(text + b"And?")) == {"a": len(text) // 64 * 64}
    assert index.match(Content.of_tokens(list(text))) == {}


def test_a_workers_bound_forgets_its_oldest() -> None:
    index = PrefixIndex(max_entries_per_worker=4)
    store(index, "a", [1] * 32)
    store(index, "a", LONG)
    assert match(index, [1] * 32) == {}
    assert match(index, LONG) == {"a": 64}
    assert index.statistics().forgotten_total == 2


def test_what_is_used_again_is_not_the_oldest() -> None:
    index = PrefixIndex(max_entries_per_worker=4)
    store(index, "a", [1] * 32)
    store(index, "a", [2] * 32)
    index.expect("a", Content.of_tokens([1] * 32), 16, expires_s=1.0)
    store(index, "a", [3] * 32)
    assert match(index, [1] * 32) == {"a": 32}
    assert match(index, [2] * 32) == {}


def test_the_bound_of_all_is_kept_by_whoever_has_most() -> None:
    index = PrefixIndex(max_entries=5)
    store(index, "a", LONG)
    store(index, "b", [1] * 16)
    store(index, "b", [2] * 16)
    index.expect("b", Content.of_tokens([3] * 16), 16, expires_s=1.0)
    index.check()
    assert index.statistics().num_held + index.statistics().num_expected == 5


def test_an_id_that_is_none_is_an_error_of_the_caller() -> None:
    with pytest.raises(struct.error):
        Content.of_tokens([-1])


SMALL = st.lists(st.integers(0, 1), min_size=0, max_size=12)  # blocks of two: eight prompts share most prefixes
WORKERS = st.sampled_from("abc")


class Worlds(RuleBasedStateMachine):
    """Engines with copies of blocks, events of which some get lost, and what the index must make of it."""

    @initialize(bounded=st.booleans())
    def begin(self, bounded: bool) -> None:
        self.bounded = bounded
        self.index = PrefixIndex(max_entries=6, max_entries_per_worker=4) if bounded else PrefixIndex()
        # what the engines have told of: worker -> (prefix) -> copies by medium
        self.told: dict[str, dict[tuple[int, ...], Counter[str]]] = {name: {} for name in "abc"}
        self.hopes: dict[str, dict[tuple[int, ...], float]] = {name: {} for name in "abc"}
        self.now_s = 0.0

    @rule(worker=WORKERS, tokens=SMALL, first=st.integers(0, 5), medium=st.sampled_from(["GPU", "CPU"]))
    def stored(self, worker: str, tokens: list[int], first: int, medium: str) -> None:
        tokens = tokens[: len(tokens) // 2 * 2]
        if first * 2 >= len(tokens):
            return
        before = self.index.statistics()
        store(self.index, worker, tokens, first=first, size=2, medium=medium)
        told = self.told[worker]
        known = not first or tuple(tokens[: first * 2]) in told
        if not self.bounded:
            assert (self.index.statistics().orphans_total == before.orphans_total) is known
        for end in range(first * 2 + 2, len(tokens) + 1, 2) if known else ():
            told.setdefault(tuple(tokens[:end]), Counter())[medium] += 1
            self.hopes[worker].pop(tuple(tokens[:end]), None)

    @rule(worker=WORKERS, tokens=SMALL, medium=st.sampled_from(["GPU", "CPU"]))
    def removed(self, worker: str, tokens: list[int], medium: str) -> None:
        tokens = tokens[: len(tokens) // 2 * 2]
        self.index.removed(worker, names(tokens, 2, worker)[-1:], medium=medium)
        copies = self.told[worker].get(tuple(tokens), Counter())
        if copies[medium]:
            copies[medium] -= 1
            if not +copies:
                del self.told[worker][tuple(tokens)]

    @rule(worker=WORKERS, tokens=SMALL, lasts_s=st.integers(1, 3))
    def sent(self, worker: str, tokens: list[int], lasts_s: int) -> None:
        hopes = self.hopes[worker]
        expires_s = max([self.now_s + lasts_s, *hopes.values()])
        self.index.expect(worker, Content.of_tokens(tokens), 2, expires_s=expires_s)
        for end in range(2, len(tokens) + 1, 2):
            if tuple(tokens[:end]) not in self.told[worker]:
                hopes[tuple(tokens[:end])] = expires_s

    @rule()
    def time_passes(self) -> None:
        self.now_s += 1.0
        self.index.expire(self.now_s)
        for worker, hopes in self.hopes.items():
            self.hopes[worker] = {prefix: at for prefix, at in hopes.items() if at > self.now_s}

    @rule(worker=WORKERS)
    def restarted(self, worker: str) -> None:
        self.index.clear(worker)
        self.told[worker], self.hopes[worker] = {}, {}

    @rule(tokens=SMALL)
    def looks(self, tokens: list[int]) -> None:
        found = self.index.match(Content.of_tokens(tokens))
        for worker in "abc":
            known = {**self.told[worker], **self.hopes[worker]}
            depth = 0
            while depth + 2 <= len(tokens) and tuple(tokens[: depth + 2]) in known:
                depth += 2
            if self.bounded:
                assert found.get(worker, 0) <= depth, "it must not invent anything"
            else:
                assert found.get(worker, 0) == depth

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "index"):
            self.index.check()


TestWorlds = Worlds.TestCase
TestWorlds.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_blocks_are_nothing_to_the_garbage_collector() -> None:
    """A million of them would stop the router for most of a second at each full collection."""
    index = PrefixIndex()
    ids = list(range(64))
    index.stored("w", block_hashes=[1, 2, 3, 4], parent=None, token_ids=ids, block_size=16)
    index.expect("w", Content.of_tokens([9, *ids]), 16, expires_s=1.0)
    holding = index._holdings["w"]
    assert not any(gc.is_tracked(record) for record in [*holding.held.values(), *holding.expected.values()])
    assert len(holding) == 8


@given(st.integers(2000, 2100), st.integers(1, 3000))
def test_long_ids_have_the_hashes_of_their_content(num_tokens: int, block_size: int) -> None:
    ids = [random.Random(num_tokens).randrange(2**32) for _ in range(num_tokens)]
    root = root_of("lora", ("salt",))
    content, long = Content.of_tokens(ids, lora="lora", salt="salt"), LongIds(json.dumps(ids).encode(), root)
    assert list(long.hashes(block_size)) == list(content.hashes(block_size))
    assert (long.num_units, long.unit_bytes) == (content.num_units, content.unit_bytes)


def test_long_ids_are_decoded_as_far_as_they_are_looked_up() -> None:
    ids = list(range(100_000, 104_000))
    index = PrefixIndex()
    index.stored("w", block_hashes=[1, 2], parent=None, token_ids=ids[:32], block_size=16)
    broken = LongIds(json.dumps(ids).encode()[:-1] + b", -1]", b"")
    assert index.match(broken) == {"w": 32}
    assert len(broken._data) < 4 * 200, "nobody looked behind the first piece"
    known = list(Content.of_tokens(ids).hashes(16))
    assert list(broken.hashes(16)) == known[: len(broken._data) // 64], "what is wrong ends the prompt before it"
