"""Every experiment, run small against servers of known timing, says what is so."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.support.upstream import Upstream

from tollbridge.bench.bracket import Tried, edges, next_rate
from tollbridge.bench.experiments import (
    break_even,
    chunked,
    goodput,
    interference,
    length_sweep,
    load,
    memory,
    prefix_grid,
    separation,
    trace,
)
from tollbridge.bench.outcome import Experiment
from tollbridge.bench.records import Arm
from tollbridge.bench.run import check_settings, measure
from tollbridge.bench.session import Options
from tollbridge.cli.main import run as cli
from tollbridge.errors import ConfigError
from tollbridge.report.document import Document

Pair = tuple[Upstream, Upstream]


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with Upstream().serving() as fast, Upstream().serving() as slow:
        slow.ttft_s = 0.04
        yield fast, slow


def arms_of(pair: Pair, names: Sequence[str] = ("fast", "fast-again", "slow")) -> list[Arm]:
    urls = {"fast": pair[0].url, "fast-again": pair[0].url, "slow": pair[1].url}
    return [Arm(name=name, url=urls[name], workers=[urls[name]]) for name in names]


async def run(module: Any, settings: Any, arms: list[Arm], out: Path) -> tuple[Document, dict[str, Any]]:
    options = Options(names={arm.url: arm.name for arm in arms})
    found = await measure(
        Experiment("it", module), arms, settings, out, seed=1, options=options, tell=lambda _: None, about={}
    )
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    assert json.loads((out / "result.json").read_text())["experiment"] == "it"
    return found


async def test_interference_finds_whose_gaps_are_longer(pair: Pair, tmp_path: Path) -> None:
    pair[0].gap_s, pair[1].gap_s = 0.005, 0.06
    pair[0].ttft_s, pair[1].ttft_s = 0.04, 0.15
    settings = interference.Settings(streams=2, long_tokens=64, arrivals=1, blocks=3, load=0.3)
    document, result = await run(interference, settings, arms_of(pair), tmp_path)
    over = result["cells"]["interference"]["over_baseline"]["slow"]
    assert over["steady_itl_p50_ms"]["ratio"] > 2 and over["ttft_p50_ms"]["ratio"] > 1.2
    # a machine that others use may hide a p99; what must never be is a headline that claims more than the figures do
    assert over["steady_itl_p99_ms"]["claimed"] is ("No difference" not in document.headline)


async def test_length_sweep_says_what_is_added(pair: Pair, tmp_path: Path) -> None:
    pair[0].ttft_s, pair[1].ttft_s = 0.03, 0.4  # so far apart that it is claimed on a busy machine, too
    settings = length_sweep.Settings(lengths=(16, 64), output=2, repeats=2, blocks=3, kv_bytes_per_token=1000.0)
    document, _ = await run(length_sweep, settings, arms_of(pair), tmp_path)
    table = document.sections[1].table
    assert table is not None and [row[0] for row in table.rows] == ["16", "64"]
    assert "a split request of 64 tokens" in document.headline


async def test_length_sweep_of_a_single_arm_has_a_report(pair: Pair, tmp_path: Path) -> None:
    settings = length_sweep.Settings(lengths=(16,), output=2, repeats=1, blocks=2)
    document, _ = await run(length_sweep, settings, arms_of(pair)[:1], tmp_path)
    assert document.sections[0].figures[0].count("<polyline") == 1


async def test_load_in_an_open_and_in_a_closed_loop(pair: Pair, tmp_path: Path) -> None:
    pair[1].ttft_s = 0.1
    for name, settings in {
        "open": load.Settings(rate=40, duration=0.5, prompt_tokens=4, output_tokens=2, blocks=3),
        "closed": load.Settings(requests=8, prompt_tokens=4, output_tokens=2, blocks=3),
    }.items():
        document, result = await run(load, settings, arms_of(pair), tmp_path / name)
        assert result["cells"]["load"]["figures"]["slow"]["failed"] == 0
        assert document.headline.startswith("TTFT p50, slow over fast:")
        assert result["cells"]["load"]["over_baseline"]["slow"]["ttft_p50_ms"]["ratio"] > 1.5


async def test_a_report_is_made_again_from_the_records_alone(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = load.Settings(requests=2, prompt_tokens=4, output_tokens=2, blocks=2)
    options = Options()
    await measure(
        Experiment("load", load),
        arms_of(pair),
        settings,
        tmp_path,
        seed=1,
        options=options,
        tell=lambda _: None,
        about={},
    )
    before = (tmp_path / "report.html").read_text()
    (tmp_path / "report.html").unlink()
    assert cli(["bench", "report", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").read_text() == before
    assert cli(["bench", "report", str(tmp_path / "nowhere")]) == 2
    assert "cannot be read" in capsys.readouterr().err


async def test_goodput_brackets_the_rate_that_a_server_stands(pair: Pair, tmp_path: Path) -> None:
    settings = goodput.Settings(ttft_s=0.03, first_rate=10, duration=0.5, steps=0, prompt_tokens=4, output_tokens=2)
    document, result = await run(goodput, settings, arms_of(pair, ["slow"]), tmp_path)
    assert "0 to" in document.headline  # its TTFT is 40 ms at any rate
    figures = result["cells"]["10/s"]["figures"]["slow"]
    assert figures["completed"] > 0 and figures["request_goodput"] == 0.0
    with pytest.raises(ConfigError, match="choose one of server"):
        goodput.slo_of(goodput.Settings(slo="sever"))


async def test_separation_believes_only_counters(pair: Pair, tmp_path: Path) -> None:
    arms = [Arm(name="split", url=pair[0].url, workers=[pair[0].url, pair[1].url], num_workers=2)]
    settings = separation.Settings(prompt_tokens=8, output_tokens=4)
    document, _ = await run(separation, settings, arms, tmp_path)
    assert document.headline.startswith("NOT split: one worker generated every token")


async def test_prefix_grid_and_memory_without_workers_that_tell(pair: Pair, tmp_path: Path) -> None:
    grid = prefix_grid.Settings(kinds=(2,), concurrency=(2,), prefix_tokens=8, own_tokens=2, output_tokens=2, blocks=2)
    document, _ = await run(prefix_grid, grid, arms_of(pair), tmp_path / "grid")
    assert "slow" in document.headline and "of 1 cells" in document.headline
    small = memory.Settings(concurrency=(1, 2), prompt_tokens=4, output_tokens=2, requests=4)
    document, _ = await run(memory, small, arms_of(pair, ["fast"]), tmp_path / "memory")
    assert document.headline.startswith("No worker's memory could be seen")


async def test_chunked_is_interference_by_other_arms(pair: Pair, tmp_path: Path) -> None:
    pair[0].ttft_s, pair[0].gap_s, pair[1].ttft_s, pair[1].gap_s = 0.04, 0.005, 0.08, 0.01
    settings = chunked.Settings(streams=1, long_tokens=64, arrivals=1, blocks=3, load=0.3)
    document, _ = await run(chunked, settings, arms_of(pair, ["fast", "slow"]), tmp_path)
    assert "Slow against fast" in document.headline


async def test_a_trace_is_replayed_as_it_is_stated(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    lines = [{"timestamp": 1000 * at, "input_length": 600, "output_length": 16, "hash_ids": [0, at]} for at in range(9)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = trace.Settings(mooncake=str(path), rate=20, scale=8, requests=3, blocks=3)
    document, result = await run(trace, settings, arms_of(pair), tmp_path / "out")
    assert "lengths divided by 8" in document.lead[0]
    assert result["cells"]["trace"]["figures"]["slow"]["total_input_tokens"] == 9 * (64 + 11)
    assert pair[1].prompts[-1][:64] == pair[1].prompts[-2][:64]
    with pytest.raises(ConfigError, match="has 9 requests, 12 are asked for"):
        trace.read(trace.Settings(mooncake=str(path), requests=4, blocks=3))
    with pytest.raises(ConfigError, match="Give one trace"):
        trace.read(trace.Settings())


@pytest.mark.parametrize(
    "settings",
    [
        load.Settings(blocks=0),
        load.Settings(rate=float("inf")),
        load.Settings(cv=-1.0),
        interference.Settings(load=float("nan")),
        length_sweep.Settings(lengths=()),
        length_sweep.Settings(lengths=(512, 0)),
    ],
)
def test_a_number_that_cannot_be_meant_is_refused(settings: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be: give"):
        check_settings(settings)
    check_settings(load.Settings(cv=0.0, rate=3.0, warmup=0))


def test_a_bracket_closes_from_either_side() -> None:
    def search(limit: float, first: float, steps: int) -> tuple[float, float]:
        tried: list[Tried] = []
        while (rate := next_rate(tried, first, steps)) is not None:
            tried.append(Tried(rate=rate, holds=rate <= limit))
        return edges(tried)

    for first in (0.5, 8.0, 100.0):
        low, high = search(limit=7.0, first=first, steps=3)
        assert low <= 7.0 < high and high / low <= 2 ** (1 / 8) + 1e-9
    assert search(limit=0.0, first=1.0, steps=2)[0] == 0.0
    assert search(limit=1e9, first=1.0, steps=2)[1] == float("inf")


def test_where_curves_cross() -> None:
    assert break_even.crossing([(1, 8, 2), (4, 2, 2), (16, 0.5, 2)]) == pytest.approx(4)
    assert break_even.crossing([(1, 4, 2), (4, 1, 2)]) == pytest.approx(2)
    assert break_even.crossing([(1, 4, 2), (4, 3, 2)]) is None
