"""From a real worker through the calibration file to the planner and the router."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.stub_worker import SECRET, StubWorker, stubs
from tests.worker.process import Worker
from tollbridge.cli.main import run
from tollbridge.config.calibration import (
    Calibration,
    EngineCalibration,
    LinkCalibration,
    PrefillFit,
    merge_calibration,
    read_calibration,
)
from tollbridge.config.cluster import ClusterConfig, RouterConfig
from tollbridge.router.main import listening

PLANS = Path(__file__).parents[2] / "benchmarks" / "plans"
LINK = LinkCalibration(goodput_bytes_per_s=117e6, raw_bytes_per_s=118e6, rtt_s=2e-4, streams=4)


@pytest.fixture(scope="module")
def worker(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    made = Worker(tmp_path_factory.mktemp("probed") / "w.log", model=tiny_model_dir)
    try:
        made.ready()
        yield made
    finally:
        assert made.stop() == 0


@pytest.mark.slow
def test_a_real_worker_is_measured_and_planned_with(
    worker: Worker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "calibration.json"
    merge_calibration(out, links={"a>b": LINK}, measured_at="before")
    assert run(["probe", "engine", worker.url, "--quick", "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "Prefill of " in told
    assert " as engine w." in " ".join(told.split())
    calibration = read_calibration(out)
    assert calibration.links == {"a>b": LINK}, "what else was in the file stays"
    engine = calibration.engines["w"]
    assert engine.max_num_batched_tokens == 32, "the worker says its budget itself"
    assert engine.prefill.alpha_s + 32 * engine.prefill.beta_s_per_token > 0
    assert engine.decode is not None
    assert engine.decode.step_s > 0
    prefills = [sample for sample in engine.samples if sample["kind"] == "prefill"]
    assert {sample["source"] for sample in prefills} == {"metrics"}
    assert any(sample["context"] >= 256 for sample in prefills), "the shared prefix was found in the cache"
    assert run(["plan", "--model", str(PLANS / "qwen2.5-7b"), "--calibration", str(out), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["links"][0]["link"] == {"name": "a>b", "low": 117e6, "high": 117e6}
    assert planned["links"][0]["lengths"][0]["terms"]["prefill_s"] > 0


async def test_the_router_starts_from_what_was_probed(tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    fit = PrefillFit(alpha_s=0.004, beta_s_per_token=7.3e-5, gamma_s_per_token2=1e-9, residual=0.03)
    merge_calibration(out, engines={"p0": EngineCalibration(prefill=fit)}, links={"a>b": LINK}, measured_at="now")
    stub = StubWorker("p0", "prefill")
    async with stubs(stub):
        cluster = ClusterConfig(router=RouterConfig(port=0), workers=[stub.config], calibration=str(out))
        async with (
            listening(cluster, SECRET) as url,
            aiohttp.ClientSession() as session,
            session.get(url + "/fleet") as answer,
        ):
            cost = (await answer.json())["cost"]
    assert cost["engines"]["p0"]["prefill"]["beta_s_per_token"] == pytest.approx(7.3e-5)
    assert cost["links"]["a>b"]["goodput_bytes_per_s"] == 117e6


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (["engine", "http://127.0.0.1:1"], "Nobody answers at http://127.0.0.1:1: start the server"),
        (["engine", "http://127.0.0.1:1", "--max-num-batched-tokens", "0"], "must be at least 1"),
        (["link", "nonsense"], "'nonsense' must look like host:port."),
        (["link", "127.0.0.1:1", "--streams", "0"], "--streams is '0': give numbers from 1 to 64 such as 1,2,4."),
        (["link", "10.9.9.9:7200"], "needs the cluster secret: set TOLLBRIDGE_SECRET on both"),
        (["link", "serve", "--bind", "10.9.9.9:0"], "needs the cluster secret: set TOLLBRIDGE_SECRET on both"),
        (["link", "serve", "--bind", "x"], "--bind is 'x', but must look like host:port."),
    ],
)
def test_errors_are_one_sentence(
    tokens: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TOLLBRIDGE_SECRET", raising=False)
    assert run(["probe", *tokens]) in (1, 2)
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    script = """
import sys
from pathlib import Path
from tollbridge.config.calibration import LinkCalibration, merge_calibration
for index in range(20):
    link = LinkCalibration(goodput_bytes_per_s=1.0 + index)
    merge_calibration(Path(sys.argv[1]), links={f"{sys.argv[2]}>{index}": link}, measured_at="now")
"""
    writers = [subprocess.Popen([sys.executable, "-c", script, str(out), name]) for name in "ab"]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    assert len(read_calibration(out).links) == 40
    assert [path.name for path in tmp_path.iterdir()] == ["calibration.json"]


def test_a_file_that_is_no_calibration_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "calibration.json"
    out.write_text("my notes")
    assert run(["probe", "engine", "http://127.0.0.1:1", "--out", str(out)]) == 2
    assert "is malformed" in capsys.readouterr().err
    assert out.read_text() == "my notes"


def test_a_merge_replaces_by_name(tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    given: dict[str, Any] = {"measured_at": "now"}
    merge_calibration(out, links={"a>b": LINK}, **given)
    merged = merge_calibration(out, links={"a>b": LinkCalibration(goodput_bytes_per_s=5.0)}, **given)
    assert merged == Calibration(links={"a>b": LinkCalibration(goodput_bytes_per_s=5.0)}, measured_at="now")
    assert read_calibration(out) == merged
