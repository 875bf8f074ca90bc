"""Frame sizes, goodput and the bandwidth cap, with time as an argument."""

from __future__ import annotations

import pytest

from tollbridge.errors import ConfigError
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.pacing import FrameSizer, GoodputMeter, TokenBucket

MIB = 1024 * 1024


def test_the_meter_follows_the_link() -> None:
    meter, now_s = GoodputMeter(), 0.0
    for rate in (100e6, 10e6):
        for _ in range(200):
            meter.sent(int(rate * 0.005), now_s)
            now_s += 0.005
        assert meter.bytes_per_s == pytest.approx(rate, rel=0.3)


def test_idle_time_is_not_the_links() -> None:
    meter = GoodputMeter()
    meter.sent(MIB, 0.0)
    meter.sent(MIB, 0.01)
    before = meter.bytes_per_s
    meter.idle()
    assert not meter.sent(1000, 60.0)
    assert meter.bytes_per_s == before > 0


def test_frames_are_at_most_30_ms_of_goodput() -> None:
    sizer = FrameSizer(TransferOptions(max_frame_bytes=2 * MIB))
    first = sizer.frame_bytes
    sizer.update(3e9)
    assert sizer.frame_bytes == 2 * first  # one measurement may be the kernel's buffer: grow by steps
    for _ in range(10):
        sizer.update(3e9)
    assert sizer.frame_bytes == 2 * MIB
    assert sizer.unsent_bytes == 4 * MIB
    for _ in range(10):
        sizer.update(10e6)
    assert sizer.frame_bytes == 300_000
    assert sizer.unsent_bytes <= 256 * 1024
    for _ in range(10):
        sizer.update(1e5)
    assert sizer.frame_bytes == sizer.unsent_bytes == 64 * 1024


def test_lanes_share_the_smallest_frame() -> None:
    sizer = FrameSizer(TransferOptions(streams=4))
    assert sizer.frame_bytes == sizer.unsent_bytes == 64 * 1024
    for _ in range(10):
        sizer.update(1e5)
    assert sizer.frame_bytes == sizer.unsent_bytes == 16 * 1024


def test_the_cap_shrinks_frames_too() -> None:
    sizer = FrameSizer(TransferOptions(bandwidth_cap_bytes_per_s=4e6))
    for _ in range(10):
        sizer.update(3e9)
    assert sizer.frame_bytes == 120_000


def test_the_bucket_keeps_the_average() -> None:
    bucket, now_s, sent = TokenBucket(1e6, 0.0), 0.0, 0
    while now_s < 10.0:
        wait_s = bucket.wait_s(now_s)
        if wait_s:
            now_s += wait_s
            continue
        bucket.take(100_000, now_s)
        sent += 100_000
    assert sent == pytest.approx(10e6, rel=0.03)


def test_a_pause_earns_little() -> None:
    bucket = TokenBucket(1e6, 0.0)
    assert bucket.wait_s(100.0) == 0
    bucket.take(110_000, 100.0)
    assert bucket.wait_s(100.0) == pytest.approx(0.1)


def test_without_a_cap_nothing_waits() -> None:
    bucket = TokenBucket(None, 0.0)
    bucket.take(10**12, 0.0)
    assert bucket.wait_s(0.0) == 0.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"heartbeat_s": 0},
        {"heartbeat_s": 6},
        {"open_timeout_s": -1},
        {"min_frame_bytes": 0},
        {"min_frame_bytes": 100, "max_frame_bytes": 99},
        {"bandwidth_cap_bytes_per_s": 0},
        {"dscp": 64},
        {"bind_port": 70000},
    ],
)
def test_options_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="Transfer option"):
        TransferOptions(**wrong)  # type: ignore[arg-type]


def test_the_secret_is_not_in_the_repr() -> None:
    assert "hush" not in repr(TransferOptions(secret=b"hush"))
