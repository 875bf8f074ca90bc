"""The commands, as a person runs them."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from tollbridge.cli.main import run

CLUSTER = "model: Qwen/Qwen2.5-7B-Instruct\ndeploy: {name: pd, namespace: pd}\n"
BROKEN = Path(__file__).parents[1] / "deploy" / "broken"


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOLLBRIDGE_SECRET", raising=False)


def cluster_file(folder: Path, text: str = CLUSTER) -> str:
    path = folder / "tollbridge.yaml"
    path.write_text(text)
    return str(path)


def test_a_base_is_written_and_found_sound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tmp_path / "base"
    args = ["deploy", "render", "--to", "disaggregatedset", "--config", cluster_file(tmp_path), "--out", str(base)]
    assert run(args) == 0
    assert "memory limit 15.4 GB = (process assumed 8.59 GB" in capsys.readouterr().err
    assert run(["deploy", "validate", str(base)]) == 0
    assert stat.S_IMODE((base / "secret.yaml").stat().st_mode) == 0o600
    secret = (base / "secret.yaml").read_text()
    assert run(args) == 0
    assert (base / "secret.yaml").read_text() == secret


def test_the_secret_is_taken_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOLLBRIDGE_SECRET", "the-secret-of-this-cluster")
    assert run(["deploy", "render", "--to", "deployments", "--config", cluster_file(tmp_path)]) == 0
    assert "TOLLBRIDGE_SECRET: the-secret-of-this-cluster" in capsys.readouterr().out


def test_what_is_rendered_is_judged_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = CLUSTER.replace("namespace: pd", "namespace: pd, decode: {args: [--block-size=32]}")
    assert run(["deploy", "render", "--to", "dgd", "--config", cluster_file(tmp_path, text)]) == 1
    assert "--block-size is not set on prefill, 32 on decode" in capsys.readouterr().err


def test_a_lower_limit_is_refused_unless_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = CLUSTER.replace("namespace: pd", "namespace: pd, prefill: {memory_limit: 3584Mi}")
    args = ["deploy", "render", "--to", "deployments", "--config", cluster_file(tmp_path, text)]
    assert run(args) == 2
    assert "x 1.15" in capsys.readouterr().err
    assert run([*args, "--force"]) == 0


def test_findings_are_told_and_end_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    path = BROKEN / "side-channel-any.yaml"
    assert run(["deploy", "validate", str(path)]) == 1
    told = capsys.readouterr().out
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST is '0.0.0.0'" in told
    assert "mend: valueFrom" in told
    assert run(["deploy", "validate", str(path), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert {each["rule"] for each in document["findings"]} == {"side-channel"}


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["validate"], "which manifests"),
        (["validate", "no-such-file.yaml"], "does not exist"),
        (["render", "--to", "dgd", "--run"], "--run goes with --to local-check"),
        (["render", "--to", "nothing"], "nothing"),
    ],
)
def test_mistakes_are_told_in_a_sentence(args: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["deploy", *args]) == 2
    assert sentence in capsys.readouterr().err


def test_local_check_shows_the_command_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["deploy", "render", "--to", "local-check", "--config", cluster_file(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("vllm.entrypoints.openai.api_server") == 2
    assert "prefer: decode" in shown
