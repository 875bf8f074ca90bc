"""fp8 on the wire: the numbers themselves, and transfers that use it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import kv_proxy
from tests.support.kv_proxy import KvProxy
from tests.transfer.harness import DIGEST, FINGERPRINT, NUM_LAYERS, PATIENT, TOKEN_BYTES, Pair, PairMaker, new_id
from tollbridge.errors import ConfigError
from tollbridge.transfer.base import LoadRequest, Reason
from tollbridge.transfer.codec import NUMBERS, Fp8Codec, maybe_codec
from tollbridge.transfer.coded import coded
from tollbridge.transfer.memory import BufferMemory
from tollbridge.transfer.options import TransferOptions

HEADS, HEAD_SIZE = 2, 12  # of FINGERPRINT
ROWS = 2 * HEADS
FP8 = replace(PATIENT, codec="fp8")
TABLE = list(range(64))


def codec(dtype: str = "float32") -> Fp8Codec:
    return Fp8Codec(dtype=dtype, num_kv_heads=HEADS, head_size=HEAD_SIZE)


def through(numbers: np.ndarray, dtype: str = "float32") -> np.ndarray:
    """Return `numbers` (in the memory format of `dtype`) after encoding and decoding."""
    data = memoryview(bytearray(numbers.tobytes()))
    codec(dtype).decode(codec(dtype).encode([data]), [data])
    return np.frombuffer(data, dtype=numbers.dtype).reshape(numbers.shape)


def rows(seed: int, num_tokens: int = 40) -> np.ndarray:
    """Return float32 KV whose rows have very different sizes."""
    rng = np.random.default_rng(seed)
    sizes = np.exp2(rng.uniform(-60, 60, (num_tokens, ROWS, 1)))
    return (rng.standard_normal((num_tokens, ROWS, HEAD_SIZE)) * sizes).astype(np.float32)


def nearest(row: np.ndarray) -> np.ndarray:
    """Return the nearest E4M3 numbers times the row's power of two, half to even: the definition, slowly."""
    scale = 2.0 ** np.ceil(np.log2(np.abs(row).max() / 448))
    positive = NUMBERS[:0x7F].astype(np.float64)
    distance = np.abs(positive[None, :] - np.abs(row.astype(np.float64) / scale)[:, None])
    best = distance.min(axis=1, keepdims=True)
    candidates = [np.flatnonzero(line) for line in distance == best]
    codes = [int(each[each % 2 == 0][0]) if len(each) > 1 else int(each[0]) for each in candidates]
    return np.copysign(positive[codes] * scale, row)


@pytest.mark.parametrize("seed", range(5))
def test_every_number_becomes_the_nearest_one(seed: int) -> None:
    numbers = rows(seed)
    numbers[0, 0] = np.float32(448) * np.linspace(-1, 1, HEAD_SIZE)
    numbers[1, 0, :6] = np.array([1, 17 / 16, 19 / 16, 17 / 16 + 2**-20, 2**-9.5, 448.00003], dtype=np.float32)
    expected = np.array([[nearest(row) for row in token] for token in numbers])
    assert np.array_equal(through(numbers).astype(np.float64), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_error_is_a_sixteenth_at_most(dtype: str) -> None:
    numbers = rows(1)
    stored: np.ndarray = numbers
    if dtype == "float16":
        stored = np.clip(numbers, -65504, 65504).astype(np.float16)
    elif dtype == "bfloat16":
        stored = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    once = through(stored, dtype)
    assert np.array_equal(through(once, dtype), once)  # nothing more is lost the second time
    before, after = (widened(each) for each in (stored, once))
    largest = np.abs(before).max(axis=2, keepdims=True)
    bound = np.maximum(np.abs(before) / 16, largest * 2.0**-17)  # half a step of E4M3's subnormals
    if dtype == "float16":
        bound = np.maximum(bound, 2.0**-24)  # its own smallest step
    assert (np.abs(after - before) <= bound).all()


def widened(stored: np.ndarray) -> np.ndarray:
    """Return float32, of bfloat16 bits as well."""
    return (stored.astype(np.uint32) << 16).view(np.float32) if stored.dtype == np.uint16 else stored.astype(np.float32)


def test_zeros_infinities_and_extremes() -> None:
    numbers = np.zeros((4, ROWS, HEAD_SIZE), dtype=np.float32)
    numbers[1, 0, 3], numbers[1, 1, 0], numbers[2, 0] = np.inf, np.nan, 1e-44
    numbers[2, 1], numbers[3, 3, 1] = 3.2e38, -0.0
    after = through(numbers)
    assert np.isnan(after[1, :2]).all() and not after[1, 2:].any()
    assert not after[[0, 3]].any() and not after[2, 0].any()
    assert np.allclose(after[2, 1], 3.2e38, rtol=1 / 16)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.sampled_from(["float32", "bfloat16", "float16"]))
@settings(max_examples=25, deadline=None)
def test_how_tokens_are_cut_into_views_and_frames_does_not_matter(sizes: list[int], dtype: str) -> None:
    each = codec(dtype)
    random = np.random.default_rng(len(sizes)).integers(0, 0x3F, sum(sizes) * each.memory_bytes, dtype=np.uint8)
    data = memoryview(random.tobytes())
    ends = np.cumsum(sizes) * each.memory_bytes
    views = [data[end - size * each.memory_bytes : end] for size, end in zip(sizes, ends, strict=True)]
    whole = each.encode([data])
    assert each.encode(views) == whole == b"".join(each.encode([view]) for view in views)
    assert len(whole) == sum(sizes) * each.token_bytes
    targets = [memoryview(bytearray(len(view))) for view in views]
    each.decode(whole, targets)
    one = memoryview(bytearray(len(data)))
    each.decode(whole, [one])
    assert b"".join(targets) == one


def test_bytes_on_the_wire() -> None:
    for dtype, ratio in (("bfloat16", 0.508), ("float32", 0.254)):
        each = Fp8Codec(dtype=dtype, num_kv_heads=3, head_size=64)
        assert each.token_bytes / each.memory_bytes == pytest.approx(ratio, abs=0.0005)


def test_memory_that_it_does_not_fit() -> None:
    replace = msgspec.structs.replace
    assert maybe_codec("none", FINGERPRINT) is None
    for fingerprint in (replace(FINGERPRINT, layout="head-major:k,v"), replace(FINGERPRINT, dtype="int8")):
        with pytest.raises(ConfigError, match="needs a token-major cache"):
            maybe_codec("fp8", fingerprint)
    with pytest.raises(ConfigError, match="not known"):
        maybe_codec("zip", FINGERPRINT)
    memory = BufferMemory(bytearray(96 * 4 * 3), num_layers=3, num_blocks=1, block_size=4, token_bytes=96)
    with pytest.raises(ConfigError, match="expects 192 bytes"):
        coded("fp8", memory, replace(FINGERPRINT, dtype="float32"))


# ── transfers ──


def expected(pair: Pair, num_tokens: int, first_token: int = 0) -> np.ndarray:
    """Return what decode shall hold."""
    sent = pair.send_cache.tokens(TABLE, first_token, num_tokens)
    return through(sent.view(np.float16), "float16").view(np.uint8)


def fill(pair: Pair) -> None:
    """Give prefill a cache of float16 numbers rather than of random bytes."""
    numbers = np.random.default_rng(3).standard_normal(pair.send_cache.array.size // 2)
    pair.send_cache.array[:] = numbers.astype(np.float16).view(np.uint8)


def start(pair: Pair, num_tokens: int, *, first_token: int = 0, address: tuple[str, int] | None = None) -> str:
    transfer_id = new_id()
    host, port = address or pair.sender.address
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=first_token + num_tokens)
    pair.sender.publish(transfer_id, TABLE, first_token + num_tokens)
    pair.receiver.open(
        LoadRequest(
            transfer_id=transfer_id,
            host=host,
            port=port,
            digest=DIGEST,
            first_token=first_token,
            num_tokens=num_tokens,
            block_table=TABLE,
        )
    )
    return transfer_id


@pytest.mark.parametrize("receive_block_size", [16, 24])
def test_transfers_with_fp8(make_tcp: PairMaker, receive_block_size: int) -> None:
    pair = make_tcp(FP8, receive_block_size=receive_block_size)
    fill(pair)
    before = pair.receive_cache.slots.copy()
    sent, received = pair.ends(start(pair, 500, first_token=7))
    assert (sent.outcome, received.outcome) == ("done", "done")
    assert np.array_equal(pair.receive_cache.tokens(TABLE, 7, 500), expected(pair, 500, 7))
    assert np.array_equal(pair.receive_cache.slots[:, :7], before[:, :7])
    assert np.array_equal(pair.receive_cache.slots[:, 507:], before[:, 507:])
    wire_bytes = 500 * NUM_LAYERS * ROWS * (HEAD_SIZE + 1)
    assert sent.payload_bytes == received.payload_bytes == wire_bytes < 500 * NUM_LAYERS * TOKEN_BYTES


def test_both_sides_must_use_the_same(make_tcp: PairMaker) -> None:
    pair = make_tcp(FP8, receive_options=TransferOptions())
    received = pair.received.wait(start(pair, 10))
    assert received.reason == Reason.HANDSHAKE
    assert "codec is 'none' here and 'fp8' there" in received.detail


def test_a_damaged_payload_never_reaches_the_cache(make_tcp: PairMaker) -> None:
    pair = make_tcp(FP8)
    fill(pair)
    before = pair.receive_cache.slots.copy()
    with KvProxy(pair.sender.address, fault=kv_proxy.corrupt_payload(0)) as proxy:
        _, received = pair.ends(start(pair, 100, address=proxy.address))
        assert received.reason == Reason.CHECKSUM
        assert np.array_equal(pair.receive_cache.slots, before)
        assert pair.ends(start(pair, 100, address=proxy.address))[1].outcome == "done"
    assert np.array_equal(pair.receive_cache.tokens(TABLE, 0, 100), expected(pair, 100))


def test_a_frame_of_another_codec_costs_the_connection(make_tcp: PairMaker) -> None:
    pair = make_tcp(PATIENT)
    with KvProxy(pair.sender.address, fault=kv_proxy.rewrite_header(0, codec=1)) as proxy:
        received = pair.received.wait(start(pair, 100, address=proxy.address))
        assert received.reason == Reason.PROTOCOL
        assert "agreed on NONE" in received.detail


def test_prefill_cancels_and_rewinds_with_fp8(make_tcp: PairMaker) -> None:
    pair = make_tcp(FP8)
    fill(pair)
    transfer_id = new_id()
    pair.sender.register(transfer_id, digest=DIGEST, num_tokens=100)
    pair.receiver.open(pair.load(transfer_id, TABLE, 100))
    pair.sender.publish(transfer_id, TABLE[:2], 32)
    pair.sender.rewind(transfer_id)
    pair.sender.publish(transfer_id, TABLE, 100)
    assert [end.outcome for end in pair.ends(transfer_id)] == ["done", "done"]
    assert np.array_equal(pair.receive_cache.tokens(TABLE, 0, 100), expected(pair, 100))
