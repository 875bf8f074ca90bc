"""The doctor over real worker processes, each broken in its own way."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.stack import SECRET, Process, tollbridge
from tollbridge.cli import main

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Kind:
    """How a worker is started."""

    secret: str | None = SECRET
    dtype: str = "float32"
    renamed: bool = False  # the same model under another name


KINDS = {
    "p0": Kind(),
    "d0": Kind(),
    "other-secret": Kind(secret="another-secret-0123456789"),
    "no-secret": Kind(secret=None),
    "other-dtype": Kind(dtype="bfloat16"),
    "other-model": Kind(renamed=True),
}


class Clinic:
    """One worker of each kind, and what the doctor says of two of them."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        shutil.copytree(model, folder / "renamed")
        self.workers = {name: self._start(name, kind) for name, kind in KINDS.items()}
        with ThreadPoolExecutor() as pool:
            list(pool.map(Process.wait_ready, self.workers.values()))

    def _start(self, name: str, kind: Kind) -> Process:
        cluster = {
            "model": str(self.folder / "renamed" if kind.renamed else self.model),
            "dtype": kind.dtype,
            "workers": [{"name": name}],
            "engine": {"kv_cache_mib": 64, "threads": 1},
        }
        config = self.folder / f"{name}.yaml"
        config.write_text(yaml.safe_dump(cluster))
        argv = tollbridge("worker", "--name", name, "--config", str(config))
        return Process(argv, self.folder / f"{name}.log", secret=kind.secret)

    def url(self, name: str) -> str:
        return str(self.workers[name].ready["url"])

    def kv(self, name: str) -> str:
        return str(self.workers[name].ready["kv"])

    def stop(self) -> None:
        for worker in self.workers.values():
            worker.stop()


@pytest.fixture(scope="module")
def clinic(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clinic]:
    clinic = Clinic(tmp_path_factory.mktemp("clinic"), tiny_model_dir)
    yield clinic
    clinic.stop()


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOLLBRIDGE_SECRET", SECRET)
    monkeypatch.chdir(tmp_path)


class Report:
    """The doctor's JSON."""

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        document = json.loads(text)
        assert document["ok"] is (code == 0)
        self.findings: list[dict[str, Any]] = document["findings"]

    @property
    def failures(self) -> set[tuple[str, str]]:
        return {(finding["check"], finding["subject"]) for finding in self.findings if finding["ok"] is False}

    def said(self, check: str, subject: str) -> str:
        return next(str(f["said"]) for f in self.findings if (f["check"], f["subject"]) == (check, subject))


def examine(capsys: pytest.CaptureFixture[str], *args: str) -> Report:
    code = main.run(["doctor", "--json", *args])
    return Report(code, capsys.readouterr().out)


def pair(clinic: Clinic, prefill: str, decode: str) -> list[str]:
    return ["--prefill", clinic.url(prefill), "--decode", clinic.url(decode)]


def test_a_sound_pair(clinic: Clinic, capsys: pytest.CaptureFixture[str]) -> None:
    report = examine(capsys, *pair(clinic, "p0", "d0"))
    assert report.failures == set()
    assert report.code == 0
    checks = [finding["check"] for finding in report.findings if finding["ok"]]
    assert set(checks) == {
        "http",
        "model",
        "connector",
        "kv port",
        "secret",
        "clock",
        "fingerprint",
        "split",
        "goodput",
    }
    assert "decode loaded 1023 of 1024 prompt tokens" in report.said("split", "prefill>decode")
    assert "Gb/s" in report.said("goodput", "prefill>decode")


@pytest.mark.parametrize(
    ("prefill", "decode", "failures", "words"),
    [
        ("other-secret", "d0", {("secret", "prefill"), ("split", "prefill>decode")}, "does not accept ours"),
        ("no-secret", "d0", {("connector", "prefill")}, "started without the cluster secret"),
        (
            "p0",
            "other-dtype",
            {("fingerprint", "prefill>decode"), ("split", "prefill>decode")},
            "dtype is 'float32' on",
        ),
        (
            "p0",
            "other-model",
            {("model", "prefill>decode")},
            "prefill serves tiny; decode",
        ),
    ],
)
def test_a_broken_pair(
    clinic: Clinic,
    capsys: pytest.CaptureFixture[str],
    prefill: str,
    decode: str,
    failures: set[tuple[str, str]],
    words: str,
) -> None:
    report = examine(capsys, *pair(clinic, prefill, decode))
    assert report.failures == failures
    assert report.code == 1
    broken = [finding for finding in report.findings if finding["ok"] is False]
    assert words in broken[0]["said"]
    assert all(finding["mend"] for finding in broken)


def test_the_wrong_kv_port(clinic: Clinic, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody there, and somebody who speaks another protocol."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        report = examine(capsys, *pair(clinic, "p0", "d0"), "--prefill-kv", address)
    assert report.failures == {("kv port", "prefill"), ("split", "prefill>decode")}
    assert report.said("kv port", "prefill") == f"{address} cannot be reached: Connection refused"
    assert f"Could not connect to the KV port {address}" in report.said("split", "prefill>decode")
    http = clinic.url("p0").removeprefix("http://")
    report = examine(capsys, *pair(clinic, "p0", "d0"), "--prefill-kv", http)
    assert "does not speak the KV protocol" in report.said("kv port", "prefill")


def test_a_worker_that_is_not_there(clinic: Clinic, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        report = examine(capsys, "--prefill", clinic.url("p0"), "--decode", url)
    assert report.failures == {("http", "decode"), ("split", "all")}
    assert report.said("http", "decode") == f"{url} does not answer: Connection refused"


def test_without_the_secret(
    clinic: Clinic, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOLLBRIDGE_SECRET")
    report = examine(capsys, *pair(clinic, "p0", "d0"))
    assert report.failures == set()
    assert report.said("secret", "decode") == "TOLLBRIDGE_SECRET is not set here"


def test_through_a_router_and_as_text(clinic: Clinic, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    workers = [
        {"name": name, "prefer": prefer, "url": clinic.url(name), "kv": clinic.kv(name)}
        for name, prefer in (("p0", "prefill"), ("d0", "decode"))
    ]
    config = tmp_path / "cluster.yaml"
    config.write_text(yaml.safe_dump({"router": {"port": 0}, "workers": workers}))
    router = Process(tollbridge("router", "--config", str(config)), tmp_path / "router.log")
    try:
        url = router.wait_ready()["url"]
        assert main.run(["doctor", "--router", url]) == 0
        lines = capsys.readouterr().out.splitlines()
    finally:
        router.stop()
    assert all(line.startswith("ok ") for line in lines)
    assert any("split" in line and " router " in line and "p0>d0 verified" in line for line in lines)
    assert main.run(["doctor", "--router", url, "--config", str(config)]) == 1
    assert "does not answer as a router" in capsys.readouterr().out


def test_half_a_pair(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["doctor", "--prefill", "http://127.0.0.1:1"]) == 2
    assert "belong together" in capsys.readouterr().err
    assert main.run(["doctor", "--prefill", "10.0.0.1:8100", "--decode", "http://127.0.0.1:1"]) == 2
    assert "is no URL of a worker" in capsys.readouterr().err
