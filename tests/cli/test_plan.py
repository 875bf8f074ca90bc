import json
from pathlib import Path

import pytest

from tollbridge.cli.main import run

PLANS = Path(__file__).parents[2] / "benchmarks" / "plans"


def test_kv_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", str(PLANS / "qwen2.5-7b"), "--kv-dtype", "fp8", "--json"]) == 0
    kv = json.loads(capsys.readouterr().out)["kv"]
    assert kv["bytes_per_token"] == kv["bytes_per_token_long"] == 28_672
    assert kv["fixed_bytes"] == 0
    assert kv["bytes_at"]["1024"] == 1024 * 28_672


def test_a_plan_file_with_options_on_top(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(PLANS / "qwen2.5-7b-l40s.yaml")]) == 0
    out = capsys.readouterr().out
    assert "Do not split" in out
    assert "Break-even" in out
    assert run(["plan", str(PLANS / "qwen2.5-7b-l40s.yaml"), "--goodput", "10 GB/s", "--concurrency", "64"]) == 0
    assert "Split" in capsys.readouterr().out


def test_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    assert run(["plan", str(PLANS / "qwen3-0.6b-1gbe.yaml"), "--html", str(page)]) == 0
    html = page.read_text()
    assert "<h1>Do not split, on either of these links.</h1>" in html
    assert html.count("<svg") == 4
    assert "http://" not in html.replace("http://www.w3.org", "")
    assert "killed in request" in html


def test_errors_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan"]) == 2
    assert capsys.readouterr().err == (
        "tollbridge: A plan needs a model: give --model with a folder or a config.json.\n"
    )
