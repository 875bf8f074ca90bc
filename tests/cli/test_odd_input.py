"""Every command with files, addresses and numbers that are none: one sentence on stderr, the right exit code."""

import io
import json
from pathlib import Path

import pytest

from tollbridge.cli import main

MODEL = str(Path(__file__).parents[2] / "benchmarks" / "plans" / "qwen2.5-7b")
PLAN = ["plan", "--model", MODEL, "--gpu", "L40S", "--goodput", "10 Gb/s"]
VLLM = ["worker", "vllm", "some/model", "--print"]
NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a folder with files of every wrong kind."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").write_text("")
    (tmp_path / "broken").write_text("{a: [")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "list").write_text("- 1")
    (tmp_path / "unknown").write_text("nonsense: 1")
    (tmp_path / "infinite").write_text("slo: {ttft_s: .inf}")
    return tmp_path


def _refused(tokens: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    assert main.run(tokens) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("tollbridge: ") and err.count("\n") == 1, err
    return err


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("file", ["none", "folder", "broken", "bytes", "list", "unknown"])
@pytest.mark.parametrize(
    "tokens",
    [
        ["plan"],
        ["plan", "--model", MODEL, "--calibration"],
        ["sim"],
        ["sim", "--calibration"],
        ["sim", "--azure"],
        ["sim", "--mooncake"],
        ["router", "--config"],
        ["up", "--config"],
        ["doctor", "--config"],
        ["worker", "--name", "p0", "--config"],
        ["worker", "vllm", "--name", "p0", "--config"],
        ["deploy", "render", "--to", "dgd", "--config"],
        ["bench", "report"],
    ],
    ids=" ".join,
)
def test_a_file_that_is_none(tokens: list[str], file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert file in _refused([*tokens, file], 2, capsys)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["sim", "infinite"], "$.slo.ttft_s"),
        (["sim", "--rate", "-1"], "rate_per_s"),
        (["sim", "--rate", "nan"], "rate_per_s"),
        (["sim", "--rate", "inf"], "rate_per_s"),
        (["sim", "--duration", "0"], "duration_s"),
        (["sim", "--rate", "1e9", "--duration", "1e9"], "1e+18 requests would arrive"),
        (["sim", "--seeds", "0"], "--seeds"),
        ([*PLAN, "--prompt-tokens", "-5"], "prompt_tokens"),
        ([*PLAN, "--prompt-tokens", "999999999999"], "prompt_tokens"),
        ([*PLAN, "--output-tokens", "0"], "output_tokens"),
        ([*PLAN, "--concurrency", "-1"], "concurrency"),
        ([*PLAN, "--gpus", "0"], "gpus"),
        ([*PLAN, "--goodput", "1e999"], "goodput"),
        ([*PLAN, "--html", "folder"], "The page folder cannot be written: Is a directory."),
        ([*PLAN, "--html", "none/page.html"], "cannot be written: No such file or directory."),
        ([*VLLM, "--threads", "0"], "--threads is 0"),
        ([*VLLM, "--kv-cache-gib", "-3"], "--kv-cache-gib is -3"),
        ([*VLLM, "--kv-port", "99999"], "--kv-port is 99999"),
        ([*VLLM, "--events-port", "-1"], "--events-port is -1"),
        (["up", "--port", "99999"], "router.port is 99999"),
        (["probe", "link", "127.0.0.1:99999"], "port from 0 to 65535"),
        (["probe", "link", "127.0.0.1:9", "--out", "none/c.json"], "none is no folder that takes files"),
        (["probe", "engine", NOBODY, "--out", "none/c.json"], "none is no folder that takes files"),
        (["bench", "load", "--arm", f"a={NOBODY}", "--rate", "-1"], "--rate -1"),
    ],
)
def test_a_number_that_cannot_be(tokens: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in _refused(tokens, 2, capsys)


@pytest.mark.parametrize(
    "tokens",
    [
        ["doctor", "--router", "nonsense"],
        ["doctor", "--router", ""],
        ["doctor", "--router", "http://host:port"],
        ["doctor", "--prefill", "ftp://x", "--decode", NOBODY],
        ["top", "--url", "nonsense"],
        ["top", "--url", "ftp://x"],
        ["chat", "hi", "--url", "ftp://x"],
        ["probe", "engine", "nonsense"],
        ["probe", "engine", "ftp://x"],
    ],
    ids=" ".join,
)
def test_a_url_that_is_none(tokens: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "is no URL" in _refused(tokens, 2, capsys)


@pytest.mark.parametrize("flag", ["--prefill-kv", "--decode-kv"])
def test_a_kv_address_that_is_none(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = _refused(["doctor", "--prefill", NOBODY, "--decode", NOBODY, flag, "nonsense"], 2, capsys)
    assert said == f"tollbridge: {flag} is 'nonsense': it must look like host:port.\n"


@pytest.mark.parametrize(
    "tokens",
    [
        ["top", "--url", NOBODY],
        ["top", "--json", "--url", NOBODY],
        ["chat", "hi", "--url", NOBODY],
        ["probe", "engine", NOBODY],
        ["probe", "link", "127.0.0.1:9"],
    ],
    ids=" ".join,
)
def test_nobody_there(tokens: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = _refused(tokens, 1, capsys)
    assert "obody answers at" in said and "Error" not in said


@pytest.mark.usefixtures("folder")
def test_manifests_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds no manifests" in _refused(["deploy", "validate", "folder"], 2, capsys)
    assert "does not exist" in _refused(["deploy", "validate", "none"], 2, capsys)
    assert "--jsno does not exist" in _refused(["deploy", "validate", "--jsno"], 2, capsys)


def test_manifests_from_stdin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("{a: ["))
    assert main.run(["deploy", "validate", "-", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["files"] == ["-"] and [each["rule"] for each in said["findings"]] == ["yaml"]


def test_a_kept_secret_that_is_none(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOLLBRIDGE_SECRET", raising=False)
    (folder / "secret.yaml").write_text("{a: [")
    (folder / "tollbridge.yaml").write_text("model: Qwen/Qwen2.5-7B-Instruct\n")
    assert "secret.yaml holds no Secret of ours" in _refused(
        ["deploy", "render", "--to", "dgd", "--out", "."], 2, capsys
    )
