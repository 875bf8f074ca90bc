"""`tollbridge bench` on real vLLM servers: the pair that other tests share, and one that it starts itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.vllm.pair import PYTHON, ROOT, Pair
from tests.vllm.routed import routed
from tollbridge.bench.arms import parse_arm
from tollbridge.bench.experiments import length_sweep, load, prefix_grid, separation
from tollbridge.bench.local import Local, start
from tollbridge.bench.outcome import Experiment
from tollbridge.bench.records import Arm
from tollbridge.bench.run import measure
from tollbridge.bench.session import Options
from tollbridge.bench.vllm_worker import PYTHON_VARIABLE, find_vllm
from tollbridge.report.document import Document

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]


async def run(
    module: Any, settings: Any, arms: list[Arm], out: Path, names: dict[str, str]
) -> tuple[Document, dict[str, Any]]:
    """Run an experiment; none of its requests may fail."""
    found = await measure(
        Experiment("it", module), arms, settings, out, seed=1, options=Options(names=names), tell=print, about={}
    )
    failed = [arm["failed"] for cell in found[1]["cells"].values() for arm in cell["figures"].values()]
    assert failed and not any(failed)
    return found


async def test_a_running_pair_is_measured_by_its_own_counters(pair: Pair, tmp_path: Path) -> None:
    names = {pair.p.url: "p", pair.d.url: "d"}
    async with routed(pair) as (url, _):
        arms = [parse_arm(f"one={pair.d.url}"), parse_arm(f"split={url},policy=split,workers={'+'.join(names)}")]
        once = separation.Settings(prompt_tokens=300, output_tokens=8)
        document, _ = await run(separation, once, arms, tmp_path / "separation", names)
        assert document.headline == (
            "Split: p generated 1 token, d all 8, after loading the KV of 299 of 300 prompt tokens over the wire."
        )
        sweep = length_sweep.Settings(lengths=(300,), output=2, repeats=1, blocks=2)
        document, _ = await run(length_sweep, sweep, arms, tmp_path / "sweep", names)
        table = document.sections[1].table
        assert table is not None and table.rows[0][table.columns.index("KV")] != "not known"
        grid = prefix_grid.Settings(
            kinds=(2,), concurrency=(2,), prefix_tokens=256, own_tokens=16, output_tokens=2, blocks=2
        )
        document, _ = await run(prefix_grid, grid, arms, tmp_path / "grid", names)
        table = document.sections[1].table
        assert table is not None
        # of 12 prompts of 272 tokens at most two of each kind find nothing, the others 256
        assert float(table.rows[0][table.columns.index("cached prompt tokens")]) >= 8 / 12 * 256 / 272 - 0.01


async def test_a_server_that_the_bench_starts_ends_with_its_supervisor_even_if_that_is_killed(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    vllm = find_vllm("--dtype float32 --enforce-eager --max-model-len 2048", {**os.environ, PYTHON_VARIABLE: PYTHON})
    given = Local(model=str(tiny_model), names=["d0"], vllm=vllm)
    small = load.Settings(requests=4, prompt_tokens=32, output_tokens=4, blocks=1, warmup=1)
    async with start(given, ["one"]) as found:
        _, result = await run(load, small, list(found.arms), tmp_path, found.names)
        server = psutil.Process(next(iter(found.pids.values())))
        family = [server, *server.children(recursive=True)]
        supervisor = server.parent()
        assert len(family) > 1 and supervisor is not None and "worker" in supervisor.cmdline()
        supervisor.kill()
        _, left = psutil.wait_procs(family, timeout=600)
    assert not [each for each in left if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    assert result["cells"]["load"]["figures"]["one"]["queue_mean_ms"] >= 0  # by vLLM's own histogram
