"""Rendered pods as processes: what a kubelet would do, and nothing else."""

from __future__ import annotations

import itertools
import json

import msgspec
import pytest

from tests.deploy.render.test_render import ROOT, SECRET, cluster
from tollbridge.cli.local_check import router_settings
from tollbridge.config.cluster import ClusterConfig
from tollbridge.deploy.local import LocalProcess, processes, shell
from tollbridge.deploy.render.everything import render

FOLDERS = {"/models": "/cache", "/home/worker": "/scratch/home", "/opt/tollbridge-plugin": "/src"}


@pytest.fixture(autouse=True)
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def made(which: str = "1p1d") -> tuple[ClusterConfig, list[LocalProcess]]:
    given = cluster(which)
    ports = itertools.count(30000, 10)
    objects = render(given, "deployments", SECRET).objects
    return given, processes(objects, free_port=lambda: next(ports), python="/vllm/python", folders=FOLDERS)


def option(process: LocalProcess, name: str) -> str:
    return process.argv[process.argv.index(name) + 1]


def test_each_worker_listens_on_loopback_and_ports_of_its_own() -> None:
    _, (prefill, decode) = made()
    assert prefill.argv[0] == "/vllm/python"
    assert option(prefill, "--host") == "127.0.0.1"
    assert option(prefill, "--port") == str(prefill.ports["http"]) != str(decode.ports["http"])
    transfer = json.loads(option(prefill, "--kv-transfer-config"))["kv_connector_extra_config"]
    assert transfer["kv_host"] == "127.0.0.1"
    assert transfer["kv_port"] == prefill.ports["kv"]
    events = json.loads(option(decode, "--kv-events-config"))
    assert events["endpoint"] == f"tcp://127.0.0.1:{decode.ports['events']}"
    assert events["replay_endpoint"] == f"tcp://127.0.0.1:{decode.ports['events'] + 1}"


def test_a_number_that_is_no_port_stays() -> None:
    _, (prefill, _) = made()
    assert option(prefill, "--max-model-len") == "8192"
    assert option(prefill, "--shutdown-timeout") == "60"


def test_variables_come_from_where_the_pod_takes_them() -> None:
    _, (prefill, _) = made()
    assert prefill.environ["POD_IP"] == "127.0.0.1"
    assert prefill.environ["TOLLBRIDGE_SECRET"] == SECRET
    assert prefill.environ["PYTHONPATH"] == "/src"
    assert prefill.environ["VLLM_CACHE_ROOT"] == "/scratch/home/.cache/vllm"


def test_nixl_workers_have_their_side_channel_on_loopback() -> None:
    _, (prefill, decode) = made("2p1d")
    assert prefill.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
    assert prefill.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(prefill.ports["nixl"])
    assert prefill.ports["nixl"] != decode.ports["nixl"]


def test_pre_stop_asks_the_port_that_the_worker_has_here() -> None:
    _, (prefill, _) = made()
    assert prefill.pre_stop[0] == "/vllm/python"
    assert prefill.pre_stop[prefill.pre_stop.index("--port") + 1] == str(prefill.ports["http"])


def test_the_secret_is_not_shown() -> None:
    _, workers = made()
    assert all(SECRET not in shell(each) for each in workers)


def test_the_router_is_told_where_the_workers_are() -> None:
    given, workers = made()
    tree = router_settings(given, workers)
    tree.pop("discovery")
    config = msgspec.convert(tree, ClusterConfig)
    assert [each.url for each in config.workers] == [f"http://127.0.0.1:{each.ports['http']}" for each in workers]
    assert config.router.host == "127.0.0.1"
