"""Which of the two is slow, in one sentence."""

from __future__ import annotations

import pytest

from tollbridge.probe.link import LinkReport, LinkSample, Way
from tollbridge.probe.link_verdict import calibrated, verdict

MB = 1e6


def sample(how: str, streams: int, mb_per_s: float, *, way: Way = "up", loaded: bool = False) -> LinkSample:
    rate = mb_per_s * MB
    assert how in ("raw", "transfer")
    return LinkSample(
        way=way,
        how="raw" if how == "raw" else "transfer",
        streams=streams,
        loaded=loaded,
        bytes_per_s=rate,
        low=rate,
        high=rate,
    )


def report(*samples: LinkSample, line_mb_per_s: float | None = None) -> LinkReport:
    line = None if line_mb_per_s is None else line_mb_per_s * MB
    return LinkReport(
        rtt_s=2e-4, rtt_loaded_s={"up": 0.01, "down": 0.01}, line_bytes_per_s=line, samples=list(samples), notes=[]
    )


@pytest.mark.parametrize(
    ("raw", "transfer", "line", "says"),
    [
        (118, 116, 125, "a to b: the link is full, and neither is slow: our transfer moves 116 MB/s"),
        (118, 116, None, "a to b: the network is the limit, the transport keeps up with it: our transfer"),
        (300, 290, 1250, "a to b: the network is slow, not the transport (the NIC here says 1.25 GB/s (10 Gb/s)): our"),
        (
            1100,
            700,
            1250,
            "a to b: the transport is slow: our transfer moves 700 MB/s (5.6 Gb/s), plain sockets 1.1 GB",
        ),
    ],
)
def test_one_sentence(raw: float, transfer: float, line: float | None, says: str) -> None:
    found = report(sample("raw", 4, raw), sample("transfer", 4, transfer), line_mb_per_s=line)
    assert verdict(found, "up", "a", "b").startswith(says)


def test_one_connection_that_is_not_enough_is_named() -> None:
    found = report(sample("raw", 1, 300), sample("raw", 4, 1100), sample("transfer", 4, 1090))
    assert verdict(found, "up", "a", "b").endswith("with 4 connections and 300 MB/s (2.4 Gb/s) with one.")


def test_the_calibration_has_the_streams_of_workers_on_an_idle_link() -> None:
    found = report(
        sample("raw", 1, 100),
        sample("transfer", 1, 90),
        sample("transfer", 4, 95),
        sample("transfer", 8, 99),
        sample("transfer", 4, 40, loaded=True),
        sample("transfer", 4, 50, way="down"),
    )
    made = calibrated(found, "up")
    assert made is not None
    assert (made.goodput_bytes_per_s, made.raw_bytes_per_s, made.streams, made.rtt_s) == (95 * MB, 100 * MB, 4, 2e-4)
    assert len(made.samples) == 5


def test_a_direction_without_our_transfer_is_left_out() -> None:
    found = report(sample("raw", 1, 100))
    assert calibrated(found, "up") is None
    assert verdict(found, "up", "a", "b").endswith("our transfer did not get through.")
