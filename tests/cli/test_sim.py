import json
from pathlib import Path

import pytest

from tollbridge.cli.main import run

SHORT = ["--duration", "10", "--rate", "1"]


def test_policies_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sim", *SHORT, "--policy", "local", "--policy", "split"]) == 0
    out = capsys.readouterr().out
    assert "local" in out and "split" in out
    assert "Goodput: requests/s" in out


def test_the_same_seed_prints_the_same_json(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for seed, more in (("4", []), ("4", ["--step-by-step"]), ("5", [])):
        assert run(["sim", *SHORT, "--policy", "local", "--seed", seed, "--json", *more]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2]
    assert json.loads(printed[0])["policies"][0]["ttft_s"]["p50"] > 0


def test_a_scenario_file_with_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {"timestamp": 100 * at, "input_length": 600, "output_length": 5, "hash_ids": [0, at + 1]} for at in range(9)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "sim.yaml").write_text("policies: [local]\nfleet: [{count: 1}]\n")
    assert run(["sim", str(tmp_path / "sim.yaml"), "--mooncake", str(tmp_path / "trace.jsonl"), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["num_requests"], made["prompt_tokens"]) == (9, 5400)
    assert made["policies"][0]["hit_ratio"] > 0.5


def test_a_search_ranks_placements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sim.yaml").write_text("policies: [local, split]\nfleet: [{count: 2}]\n")
    assert run(["sim", str(tmp_path / "sim.yaml"), "--search", "--seeds", "1", "--duration", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["found"]
    assert {each["name"] for each in found} == {"2 alike, local", "1 P : 1 D, split"}
    assert found[0]["mean"] >= found[1]["mean"] > 0


def test_errors_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, word in (
        ([str(tmp_path / "none.yaml")], "cannot be read"),
        (["--policy", "locale"], "Did you mean 'local'"),
        (["--rate", "0"], "rate_per_s"),
        (["--azure", "a.csv", "--mooncake", "b.jsonl"], "one trace"),
    ):
        assert run(["sim", *arguments]) == 2
        err = capsys.readouterr().err
        assert word in err and err.count("\n") == 1
