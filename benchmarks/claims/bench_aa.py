"""Does an A/A run claim no difference, and is a planted delay of 5 ms found, with its size in the interval?

The whole path of `tollbridge bench`: session, blocks in random order, records, comparison. Three arms over two servers
that answer by their own clock, TTFT 20 ms: one, the same again, and one whose TTFT is 5 ms longer. Both figures of a
95 % interval are chances, so many runs are made: a right one claims a difference that is not there in about one of
twenty, and misses the true size as often.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.support.bare import ROOT
from benchmarks.support.result import ClaimResult, Table
from tollbridge.bench import stats
from tollbridge.bench.book import Book
from tollbridge.bench.compare import compare
from tollbridge.bench.figures import by_block
from tollbridge.bench.records import Arm, Head, Planned
from tollbridge.bench.session import Options, Session, Traffic

DESCRIPTION = "bench: an A/A run claims nothing, a planted delay of 5 ms is found and its size is in the interval"

TTFT_S, PLANTED_S = 0.02, 0.005
BLOCKS, REQUESTS = 6, 12
METRIC = "ttft_p50_ms"
ARMS = ("one", "one-again", "late")
MOST_WRONG = 0.15  # of the runs: 0.05 is expected of each


class Seen(NamedTuple):
    """One run."""

    aa_claimed: bool
    aa_differs: bool  # its 95 % interval, before the noise floor, which is of the same arms
    found: bool  # the planted delay was claimed
    size_ms: tuple[float, float, float]  # mean and 95 % interval


def run(quick: bool) -> ClaimResult:
    """Measure, and return the claim's verdict."""
    runs = 4 if quick else 40
    with _server(TTFT_S) as one, _server(TTFT_S + PLANTED_S) as late, tempfile.TemporaryDirectory() as folder:
        urls = [_url(one), _url(late)]
        try:
            seen = [asyncio.run(_compared(urls, Path(folder), seed)) for seed in range(runs)]
        finally:
            one.kill()
            late.kill()
    return _verdict(seen)


def _server(ttft_s: float) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "benchmarks.support.upstream", str(ttft_s), "0"]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def _url(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    return server.stdout.readline().strip()


async def _compared(urls: list[str], folder: Path, seed: int) -> Seen:
    one, late = urls
    head = Head(experiment="aa", parameters={}, arms=list(ARMS), seed=seed)
    arms = [Arm(name=name, url=url) for name, url in zip(ARMS, (one, one, late), strict=True)]
    book = Book(folder / f"{seed}.jsonl", head)
    traffic = Traffic(requests=[Planned(at_s=0.0, prompt=[1, 2], max_tokens=2) for _ in range(REQUESTS)], concurrency=1)
    async with Session(book, arms, Options(), lambda _: None) as session:
        await session.settle()
        for block in range(BLOCKS):
            await session.block("c", block, lambda arm: traffic)
    found = compare(book, "c", head.arms, [METRIC])
    ours, theirs = (by_block(book.samples, book.windows, METRIC, cell="c", arm=arm) for arm in ("late", "one"))
    size = stats.mean_interval([a - b for a, b in zip(ours, theirs, strict=True)])
    again = found.ratio(METRIC, "one-again")
    return Seen(
        aa_claimed=found.claimed(METRIC, "one-again"),
        aa_differs=again is not None and not again.low <= 1.0 <= again.high,
        found=found.claimed(METRIC, "late"),
        size_ms=size,
    )


def _verdict(seen: list[Seen]) -> ClaimResult:
    planted_ms, number = 1e3 * PLANTED_S, len(seen)
    means = sorted(one.size_ms[0] for one in seen)
    shares = {
        "aa_claimed": sum(one.aa_claimed for one in seen) / number,
        "aa_differs": sum(one.aa_differs for one in seen) / number,
        "planted_missed": sum(not one.found for one in seen) / number,
        "size_outside": sum(not one.size_ms[1] <= planted_ms <= one.size_ms[2] for one in seen) / number,
    }
    return ClaimResult(
        holds=shares["aa_claimed"] == 0 and all(share <= MOST_WRONG for share in shares.values()),
        figures={**shares, "size_median_ms": means[number // 2], "size_least_ms": means[0], "size_most_ms": means[-1]},
        bounds={"aa_claimed": "0"} | dict.fromkeys([*shares][1:], f"<= {MOST_WRONG:g} of the runs"),
        conditions={
            "runs": number,
            "blocks": BLOCKS,
            "requests": f"{REQUESTS} an arm and block, one at a time",
            "server": f"TTFT {1e3 * TTFT_S:g} ms by its own clock",
            "planted_ms": planted_ms,
        },
        table=Table(
            title="Differences in TTFT p50 between equal servers, and to one that is 5 ms later",
            columns=["share of the runs", ""],
            rows=[
                ["a difference between equal servers claimed", f"{shares['aa_claimed']:.3f}"],
                ["their 95 % interval without 1", f"{shares['aa_differs']:.3f}"],
                ["the planted delay not claimed", f"{shares['planted_missed']:.3f}"],
                ["5 ms outside the 95 % interval of its size", f"{shares['size_outside']:.3f}"],
                ["size found, median (least, most)", f"{means[number // 2]:.2f} ms ({means[0]:.2f}, {means[-1]:.2f})"],
            ],
        ),
    )
