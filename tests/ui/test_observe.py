"""A whole snapshot of a router that knows its engines and its link."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from tests.ui.records import local, split
from tollbridge.config.calibration import Calibration, DecodeFit, EngineCalibration, PrefillFit
from tollbridge.config.cluster import ClusterConfig, LinkConfig, RouterConfig, WorkerConfig
from tollbridge.router.app import make_context
from tollbridge.router.context import Context
from tollbridge.router.load import Report
from tollbridge.ui.observe import MAX_HISTORY, MAX_RECENT, history, observe
from tollbridge.ui.snapshot import Snapshot


@pytest.fixture
def context(tmp_path: Path) -> Context:
    engine = EngineCalibration(
        prefill=PrefillFit(alpha_s=0.01, beta_s_per_token=1e-3, residual=0.05),
        decode=DecodeFit(step_s=0.02, per_decode_s=0.001, residual=0.05),
    )
    path = tmp_path / "calibration.json"
    path.write_bytes(msgspec.json.encode(Calibration(engines={"p0": engine, "d0": engine})))
    it = make_context(
        ClusterConfig(
            router=RouterConfig(policy="local"),
            workers=[
                WorkerConfig(name="p0", prefer="prefill", host="a", url="http://127.0.0.1:1"),
                WorkerConfig(name="d0", prefer="decode", host="b", url="http://127.0.0.1:2"),
            ],
            links=[LinkConfig(from_host="a", to_host="b", goodput_bytes_per_s=1e8)],
            calibration=str(path),
        ),
        b"a secret of sixteen or more",
    )
    for worker in it.fleet:
        worker.judge(healthy=True)
        worker.kv = ("127.0.0.1", 9)
        worker.load.told(Report(block_size=16, kv_bytes_per_token=1000.0, total_kv_tokens=160, free_kv_tokens=40), 0.0)
    return it


def test_it_has_the_break_even_of_what_is_known(context: Context) -> None:
    now = observe(context, started_at=0.0, rss_bytes=5, memory_limit_bytes=10)
    assert now.break_even is not None
    assert (now.break_even.prefill, now.break_even.decode) == ("p0", "d0")
    assert now.break_even.tokens_at_par is not None
    assert 20 < now.break_even.tokens_at_par < 200  # one step and a half of overhead, at a millisecond a token
    (link,) = now.links
    assert link.goodput_bytes_per_s == 1e8
    assert {bound.name: (bound.used, bound.limit) for bound in now.bounds}["router memory"] == (5, 10)
    assert [(worker.kv_used_tokens, worker.kv_total_tokens) for worker in now.workers] == [(120, 160)] * 2
    assert [alert.code for alert in now.alerts] == ["policy_local"]


def test_its_size_does_not_grow_with_the_load(context: Context) -> None:
    begun = context.clock.wall()
    for number in range(3000):
        record = split(number) if number % 2 else local(number)
        record.at = begun - 2 + number / 2000
        context.decisions.add(record)
    now = observe(context, started_at=0.0)
    assert len(now.recent) == MAX_RECENT
    assert len(history(context).rows) == MAX_HISTORY
    body = msgspec.json.encode(now)
    assert len(body) < 40_000
    assert msgspec.json.decode(body, type=Snapshot) == now
    assert (
        min(cpu_s_of(context) for _ in range(10)) < 0.02
    )  # ten times what it takes: no figure, but no loop over loops


def cpu_s_of(context: Context) -> float:
    begun_s = time.process_time()
    observe(context, started_at=0.0)
    return time.process_time() - begun_s
