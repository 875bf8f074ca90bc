"""The pinned ring in front of a device: slots, order, and who waits for whom when a transfer ends in the middle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transfer.fake_device import DeviceMemory, FakeDevice
from tests.transfer.harness import DIGEST, NUM_LAYERS, PATIENT, WAIT_S, Pair, make_pair, new_id
from tollbridge.errors import ConfigError
from tollbridge.transfer.base import Reason
from tollbridge.transfer.stage import PASSED, Span
from tollbridge.transfer.staging import RingStage, granule_numbers, ring_shape

NUM_BLOCKS = 64
TABLE = list(range(NUM_BLOCKS))
NUM_TOKENS = NUM_BLOCKS * 16
SMALL = replace(PATIENT, min_frame_bytes=4096, max_frame_bytes=4096, ring_bytes=4 * 4096)
BLOCK = 16
KEY = bytes(16)


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    device = FakeDevice()
    yield device
    device.close()


@pytest.fixture
def stage(device: FakeDevice) -> RingStage:
    """Four slots of two blocks each."""
    return make_stage(device)


def make_stage(device: FakeDevice) -> RingStage:
    array = np.random.default_rng(1).integers(0, 256, (2, 8, BLOCK * 128), dtype=np.uint8)
    memory = DeviceMemory(array, device, block_size=BLOCK, granule=1)
    stage = memory.stage(max_payload_bytes=4096, ring_bytes=4 * 4096)
    assert isinstance(stage, RingStage)
    stage.array = array  # type: ignore[attr-defined]
    return stage


def content(stage: RingStage, span: Span) -> bytes:
    tokens = stage.array.reshape(2, -1, 128)  # type: ignore[attr-defined]
    return tokens[span.layer, granule_numbers(span, block_size=BLOCK, granule=1)].tobytes()


def test_lift_and_land(stage: RingStage) -> None:
    source, target = Span(0, [3, 1], 5, 20), Span(1, [6, 7], 5, 20)
    parcel = stage.lift(source)
    checksum, (payload,) = parcel.load()
    assert bytes(payload) == content(stage, source)
    assert parcel.num_bytes == 20 * 128 and checksum
    landing = stage.land(KEY, target, PASSED)
    landing.buffers[0][:] = payload
    landing.commit()
    parcel.close()
    stage.settle(KEY)
    assert content(stage, target) == content(stage, source)
    assert stage.has_room()
    stage.check()


def test_a_full_ring_has_no_room(stage: RingStage, device: FakeDevice) -> None:
    parcels = [stage.lift(Span(0, TABLE, 0, 16)) for _ in range(3)]
    landing = stage.land(KEY, Span(0, TABLE, 0, 16), PASSED)
    assert not stage.has_room()
    parcels.pop().close()
    assert stage.has_room()
    device.hold()
    landing.commit()
    parcels.append(stage.lift(Span(0, TABLE, 0, 16)))
    assert not stage.has_room()  # the slot that was landed comes back when the device got there
    stage.check()
    device.resume()
    stage.settle(KEY)
    assert stage.has_room()
    landing.close()  # committed: nothing to give back
    for parcel in parcels:
        parcel.close()
        parcel.close()
    stage.check()


def test_a_landing_that_is_given_up(stage: RingStage) -> None:
    before = stage.array.copy()  # type: ignore[attr-defined]
    landing = stage.land(KEY, Span(0, TABLE, 0, 16), PASSED)
    landing.close()
    stage.settle(KEY)
    stage.check()
    assert np.array_equal(stage.array, before)  # type: ignore[attr-defined]


def test_a_parcel_is_safe_once_settled(stage: RingStage) -> None:
    span = Span(1, [4], 0, 16)
    expected, parcel = content(stage, span), stage.lift(span)
    assert parcel.settle(None) == []
    stage.array[:] = 0  # type: ignore[attr-defined]  # the blocks are the engine's again
    _, payload = parcel.load()
    rest = [payload[0][5:]]
    assert parcel.settle(rest) == rest
    assert bytes(payload[0]) == expected
    parcel.close()


def test_a_copy_that_cannot_be_issued_costs_no_slot(stage: RingStage) -> None:
    with pytest.raises(IndexError):
        stage.lift(Span(9, TABLE, 0, 16))
    stage.check()


def test_a_payload_of_several_layers(stage: RingStage) -> None:
    source, target = Span(0, [3, 1], 10, 12, 2), Span(0, [6, 7], 10, 12, 2)
    expected = b"".join(content(stage, source._replace(layer=layer)) for layer in source.layers)
    parcel = stage.lift(source)
    assert parcel.num_bytes == len(expected)
    landing = stage.land(KEY, target, PASSED)
    landing.fill(parcel.load()[1][0])
    landing.commit()
    stage.settle(KEY)
    assert b"".join(content(stage, target._replace(layer=layer)) for layer in target.layers) == expected
    parcel.close()


def test_depth_shares_the_ring(device: FakeDevice) -> None:
    memory = DeviceMemory(np.zeros((1, 8, 1024), dtype=np.uint8), device, block_size=BLOCK, granule=1)
    stage = memory.stage(max_payload_bytes=4096, ring_bytes=16 * 4096)
    depths = []
    for _ in range(20):
        stage.join()
        depths.append(stage.depth)
    assert depths[:4] == [3, 3, 3, 3]
    assert depths[4:8] == [2, 1, 1, 1]
    assert set(depths[8:]) == {1}
    for _ in range(20):
        stage.leave()
    assert stage.depth == 3


def test_ring_shape() -> None:
    assert ring_shape(ring_bytes=64 << 20, max_payload_bytes=2 << 20, granule_bytes=100) == (32, 2 << 20)
    assert ring_shape(ring_bytes=64 << 20, max_payload_bytes=5000, granule_bytes=9000) == (5461, 12288)
    with pytest.raises(ConfigError, match=r"holds 3 frames .* raise transfer\.ring_mib"):
        ring_shape(ring_bytes=7 << 20, max_payload_bytes=2 << 20, granule_bytes=1)


@settings(deadline=None)
@given(
    table=st.lists(st.integers(0, 99), min_size=4, max_size=4, unique=True),
    granule=st.sampled_from([1, 2, 8, 16]),
    first=st.integers(0, 40),
    count=st.integers(1, 24),
)
def test_granule_numbers(table: list[int], granule: int, first: int, count: int) -> None:
    first -= first % granule
    found = granule_numbers(Span(0, table, first, count), block_size=16, granule=granule)
    tokens = range(first, first + count)
    expected = dict.fromkeys((table[token // 16] * 16 + token % 16) // granule for token in tokens)
    assert found.tolist() == list(expected)


# ── in a medium ──


class Rig:
    """A pair whose memories are devices, with rings of four frames."""

    def __init__(self, medium: str = "device-2") -> None:
        self.pair: Pair = make_pair(medium, SMALL, num_blocks=NUM_BLOCKS)
        self.prefill: FakeDevice = self.pair.send_cache.memory.device
        self.decode: FakeDevice = self.pair.receive_cache.memory.device

    def start(self) -> str:
        transfer_id = new_id()
        self.pair.sender.register(transfer_id, digest=DIGEST, num_tokens=NUM_TOKENS)
        self.pair.sender.publish(transfer_id, TABLE, NUM_TOKENS)
        self.pair.receiver.open(self.pair.load(transfer_id, TABLE, NUM_TOKENS))
        return transfer_id

    def finish(self, transfer_id: str) -> list[str]:
        return [end.outcome for end in self.pair.ends(transfer_id)]


@contextmanager
def rigged() -> Iterator[Rig]:
    rig = Rig()
    try:
        yield rig
    finally:
        rig.prefill.resume()
        rig.decode.resume()
        rig.pair.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    with rigged() as rig:
        yield rig


def in_background(task: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=task, daemon=True)
    thread.start()
    return thread


def test_more_than_the_ring_holds(rig: Rig) -> None:
    ids = [rig.start() for _ in range(6)]
    for transfer_id in ids:
        assert rig.finish(transfer_id) == ["done", "done"]
    assert np.array_equal(rig.pair.send_cache.array, rig.pair.receive_cache.array)
    rig.pair.check()


def test_an_end_waits_for_the_last_scatter(rig: Rig) -> None:
    rig.finish(rig.start())
    rig.pair.receive_cache.array[:] = 0
    rig.decode.hold_after(4)
    transfer_id = rig.start()
    assert rig.decode.backlog.wait(WAIT_S)
    rig.pair.receiver.cancel(transfer_id, "the client left")
    assert rig.decode.held_up.wait(WAIT_S)  # the medium waits for its copies
    rig.pair.received.collect()
    assert transfer_id not in rig.pair.received.ends
    rig.decode.resume()
    assert rig.pair.received.wait(transfer_id).reason == Reason.CANCELLED
    after = rig.pair.receive_cache.array.copy()
    num_copies = rig.decode.num_copies
    assert rig.pair.sent.wait(transfer_id).reason == Reason.PEER_CANCELLED
    assert rig.decode.num_copies == num_copies and np.array_equal(rig.pair.receive_cache.array, after)


def test_a_rewind_waits_for_the_gathers(rig: Rig) -> None:
    rig.finish(rig.start())
    expected = rig.pair.send_cache.slots.copy()
    rig.prefill.hold_after(6)
    transfer_id = rig.start()
    assert rig.prefill.backlog.wait(WAIT_S)
    rewinding = in_background(lambda: rig.pair.sender.rewind(transfer_id))
    assert rig.prefill.held_up.wait(WAIT_S)
    assert rewinding.is_alive()
    rig.prefill.resume()
    rewinding.join(WAIT_S)
    rig.pair.send_cache.slots[:] = np.roll(expected, 16, axis=1)  # block i's KV now lives in block i + 1
    rig.pair.sender.publish(transfer_id, [*TABLE[1:], 0], NUM_TOKENS)
    assert rig.finish(transfer_id) == ["done", "done"]
    assert np.array_equal(rig.pair.receive_cache.slots, expected)


def test_prefill_cancels_while_frames_are_staged(rig: Rig) -> None:
    rig.finish(rig.start())
    rig.prefill.hold_after(6)
    transfer_id = rig.start()
    assert rig.prefill.backlog.wait(WAIT_S)
    rig.pair.sender.cancel(transfer_id, "the client left")
    rig.pair.sent.collect()
    rig.prefill.resume()
    assert rig.pair.sent.wait(transfer_id).reason == Reason.CANCELLED
    expected = rig.pair.send_cache.array.copy()
    rig.pair.send_cache.array[:] = 0  # the blocks are the engine's again
    received = rig.pair.received.wait(transfer_id)
    if received.outcome == "done":  # all of it had left before the cancel was heard
        assert np.array_equal(rig.pair.receive_cache.array, expected)
    else:
        assert received.reason == Reason.PEER_CANCELLED
    rig.pair.check()


def test_what_is_not_computed_yet_is_not_sent(rig: Rig) -> None:
    rig.finish(rig.start())
    rig.pair.send_cache.array[:] = 0
    transfer_id = new_id()
    rig.pair.sender.register(transfer_id, digest=DIGEST, num_tokens=NUM_TOKENS)
    rig.pair.receiver.open(rig.pair.load(transfer_id, TABLE, NUM_TOKENS))
    rig.prefill.hold()
    for layer in range(NUM_LAYERS):
        rig.prefill.issue(lambda layer=layer: rig.pair.send_cache.slots[layer].fill(layer + 1))  # the forward pass
        rig.pair.sender.publish(transfer_id, TABLE, NUM_TOKENS, layer=layer)
    assert rig.prefill.held_up.wait(WAIT_S)  # the gate waits; the engine's thread does not
    rig.prefill.resume()
    assert rig.finish(transfer_id) == ["done", "done"]
    assert [set(layer.reshape(-1)) for layer in rig.pair.receive_cache.slots] == [{1}, {2}, {3}]


def test_a_rewind_takes_back_what_is_not_computed_yet(rig: Rig) -> None:
    rig.finish(rig.start())
    expected = rig.pair.send_cache.slots.copy()
    transfer_id = new_id()
    rig.pair.sender.register(transfer_id, digest=DIGEST, num_tokens=NUM_TOKENS)
    rig.pair.receiver.open(rig.pair.load(transfer_id, TABLE, NUM_TOKENS))
    rig.prefill.hold()
    rig.pair.sender.publish(transfer_id, TABLE[::-1], NUM_TOKENS)  # of these blocks nothing must leave
    rig.pair.sender.rewind(transfer_id)  # nothing was gathered, so it waits for nothing
    rig.prefill.resume()
    rig.pair.sender.publish(transfer_id, TABLE, NUM_TOKENS)
    assert rig.finish(transfer_id) == ["done", "done"]
    assert np.array_equal(rig.pair.receive_cache.slots, expected)


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_close_while_frames_are_staged(side: str) -> None:
    """All of it may have left before the thread heard of the close, and is right then: that is tried again."""
    assert any(is_cut_by_close(side) for _ in range(20))


def is_cut_by_close(side: str) -> bool:
    with rigged() as rig:
        rig.finish(rig.start())
        device = rig.prefill if side == "sender" else rig.decode
        device.hold_after(5)
        transfer_id = rig.start()
        assert device.backlog.wait(WAIT_S)
        closing = in_background((rig.pair.sender if side == "sender" else rig.pair.receiver).close)
        assert device.held_up.wait(WAIT_S)
        device.resume()
        closing.join(WAIT_S)
        assert not closing.is_alive()
        ends = rig.pair.ends(transfer_id)
        if Reason.SHUTDOWN in {end.reason for end in ends}:
            return True
        assert [end.outcome for end in ends] == ["done", "done"]
        assert np.array_equal(rig.pair.send_cache.array, rig.pair.receive_cache.array)
        return False
