from __future__ import annotations

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tollbridge.kv.hashes import ROOT, HashChain, block_hash, event_hash, prompt_hashes

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_a_block_hash_is_xxh3_of_parent_tokens_and_extra() -> None:
    data = ROOT + b"\x01\x00\x00\x00\x00\x01\x00\x00" + b"salt"
    assert block_hash(ROOT, [1, 256], b"salt") == xxhash.xxh3_128_digest(data)


def test_the_hash_of_a_known_block_never_changes() -> None:
    """Other processes, of other versions and architectures, must name the same block alike."""
    assert [value.hex() for value in prompt_hashes([1, 2, 3, 4], 2)] == [
        "68a901b2461265017087572875a840dd",
        "154f19ec1cd762d22e21ca7bd3ac2558",
    ]


def test_an_event_hash_is_the_low_half() -> None:
    assert event_hash(bytes(8) + (5).to_bytes(8, "big")) == 5
    assert event_hash(b"\xff" * 8 + bytes(8)) == 0
    assert event_hash(xxhash.xxh3_128_digest(b"x")) == xxhash.xxh3_128_intdigest(b"x") % 2**64


@given(tokens=TOKENS, cuts=st.lists(st.integers(0, 40), max_size=5), size=st.integers(1, 5))
def test_growing_in_steps_is_growing_at_once(tokens: list[int], cuts: list[int], size: int) -> None:
    chain = HashChain(size, cache_salt="s")
    for cut in sorted(cuts):
        chain.grow(tokens[:cut])
    chain.grow(tokens)
    assert chain.hashes == prompt_hashes(tokens, size, cache_salt="s")
    assert len(chain.hashes) == len(tokens) // size


@given(one=TOKENS, two=TOKENS)
def test_chains_agree_exactly_on_the_common_prefix(one: list[int], two: list[int]) -> None:
    for index, (left, right) in enumerate(zip(prompt_hashes(one, 3), prompt_hashes(two, 3), strict=False)):
        end = 3 * (index + 1)
        assert (left == right) == (one[:end] == two[:end])


def test_a_salt_changes_every_block_of_the_chain() -> None:
    plain, salted = prompt_hashes(range(12), 4), prompt_hashes(range(12), 4, cache_salt="x")
    assert not set(plain) & set(salted)
    assert prompt_hashes(range(12), 4, cache_salt="") == plain


def test_the_parent_of_a_block() -> None:
    chain = HashChain(2)
    chain.grow([1, 2, 3, 4])
    assert chain.parent(0) is None
    assert chain.parent(1) == chain.hashes[0]
