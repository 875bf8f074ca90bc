"""What is rendered is what routers look for: the router's file loads, and each pod becomes the worker that it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.deploy.render.test_render import ROOT, TARGETS, made, one
from tollbridge.config.load import load
from tollbridge.deploy.lint.case import selects
from tollbridge.deploy.lint.findings import Document
from tollbridge.deploy.lint.pods import PodView, pods_of
from tollbridge.deploy.render.everything import Rendered
from tollbridge.deploy.render.site import Target
from tollbridge.discovery.pods import Pod, maybe_endpoint


@pytest.fixture(autouse=True)
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def pods(rendered: Rendered) -> list[PodView]:
    return [pod for each in rendered.objects for pod in pods_of(Document(file="", manifest=each))]


def running(view: PodView) -> Pod:
    """Return the pod that the API server would show of a template."""
    tree: dict[str, Any] = {
        "metadata": {"name": f"pd-{view.role or view.document.name}-0", "labels": view.labels},
        "spec": {"nodeName": "node-a", "containers": view.spec["containers"]},
        "status": {"phase": "Running", "podIP": "10.42.0.7", "conditions": [{"type": "Ready", "status": "True"}]},
    }
    return msgspec.convert(tree, Pod)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["1p1d", "2p1d"])
def test_routers_find_both_roles_in_one_revision_and_nothing_else(name: str, target: Target, tmp_path: Path) -> None:
    rendered = made(name, target)
    path = tmp_path / "tollbridge.yaml"
    path.write_text(one(rendered, "ConfigMap", "pd-router")["data"]["tollbridge.yaml"])
    config = load(path, environ={}).cluster.discovery
    wanted: dict[str, Any] = {"matchLabels": {}, "matchExpressions": []}
    for part in config.selector.split(","):
        key, equals, value = part.partition("=")
        if equals:
            wanted["matchLabels"][key] = value
        else:
            wanted["matchExpressions"].append({"key": key, "operator": "Exists"})
    found = [maybe_endpoint(running(view), config) for view in pods(rendered) if selects(wanted, view.labels)]
    workers = [each.worker for each in found if each is not None]
    assert sorted(worker.prefer for worker in workers) == ["decode", "prefill"]
    assert len({worker.revision for worker in workers}) == 1 and workers[0].revision
    assert {worker.url for worker in workers} == {"http://10.42.0.7:8000"}
    assert {worker.events for worker in workers} == {"tcp://10.42.0.7:5557"}
    assert {worker.connector for worker in workers} == {"nixl" if name == "2p1d" else "tollbridge"}
    if name == "1p1d":
        assert {worker.kv for worker in workers} == {"10.42.0.7:7801"}
