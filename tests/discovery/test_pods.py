"""What a pod's labels, ports and conditions say."""

from __future__ import annotations

import json

import msgspec
import pytest

from tests.discovery.apiserver import Pod as Json
from tests.discovery.apiserver import make_pod
from tollbridge.config.cluster import DiscoveryConfig
from tollbridge.discovery.base import Endpoint
from tollbridge.discovery.pods import Pod, maybe_endpoint, serves

CONFIG = DiscoveryConfig(kind="kubernetes")
DS = "disaggregatedset.x-k8s.io"
GRAPH = "nvidia.com/dynamo"


def parse(pod: Json) -> Pod:
    return msgspec.json.decode(json.dumps(pod), type=Pod)


def endpoint(pod: Json, config: DiscoveryConfig = CONFIG) -> Endpoint:
    found = maybe_endpoint(parse(pod), config)
    assert found is not None
    return found


def bare(**labels: str) -> Json:
    return make_pod("x", None, None, labels={key.replace("__", "/"): value for key, value in labels.items()})


def test_our_own_labels_and_named_ports() -> None:
    ports = {"http": 8100, "kv": 7900, "events": 5600, "replay": 5601, "metrics": 9000}
    found = endpoint(make_pod("p0", "prefill", "abc", ip="10.0.0.5", ports=ports))
    worker = found.worker
    assert (worker.name, worker.prefer, worker.revision, worker.host) == ("p0", "prefill", "abc", "node-a")
    assert (worker.url, worker.kv) == ("http://10.0.0.5:8100", "10.0.0.5:7900")
    assert (worker.events, worker.replay) == ("tcp://10.0.0.5:5600", "tcp://10.0.0.5:5601")
    assert (worker.engine, worker.connector, found.standing) == ("vllm", "tollbridge", "serving")


def test_a_pod_that_names_no_ports_has_those_of_the_cluster_file() -> None:
    worker = endpoint(make_pod("p0", ip="fd00::5"), DiscoveryConfig(kind="kubernetes", http_port=9, kv_port=10)).worker
    assert (worker.url, worker.kv, worker.events, worker.replay) == (
        "http://[fd00::5]:9",
        "[fd00::5]:10",
        "tcp://[fd00::5]:0",  # the worker says
        None,
    )


def test_an_embedded_engine_says_itself_where_it_listens() -> None:
    worker = endpoint(make_pod("p0", labels={"tollbridge.io/engine": "embedded"})).worker
    assert (worker.engine, worker.kv) == ("embedded", "127.0.0.1:0")


def test_the_connector_is_the_pods_or_the_cluster_files() -> None:
    nixl = DiscoveryConfig(kind="kubernetes", connector="nixl")
    assert endpoint(make_pod("p0"), nixl).worker.connector == "nixl"
    assert endpoint(make_pod("p0", labels={"tollbridge.io/connector": "nixl-push"})).worker.connector == "nixl-push"


@pytest.mark.parametrize(
    ("labels", "prefer", "revision"),
    [
        ({f"{DS}__role": "decode", f"{DS}__revision": "9f", f"{DS}__slice": "0"}, "decode", "9f"),
        ({f"{DS}__role": "prefill", "tollbridge.io__role": "both", "tollbridge.io__revision": "mine"}, "any", "mine"),
        ({f"{GRAPH}-component-type": "prefill", f"{GRAPH}-worker-hash": "7a"}, "prefill", "7a"),
        ({f"{GRAPH}-component-type": "worker", f"{GRAPH}-sub-component-type": "decode"}, "decode", ""),
        ({f"{GRAPH}-component-type": "worker"}, "any", ""),
    ],
)
def test_labels_of_others(labels: dict[str, str], prefer: str, revision: str) -> None:
    worker = endpoint(bare(**labels)).worker
    assert (worker.prefer, worker.revision) == (prefer, revision)


@pytest.mark.parametrize(
    "labels",
    [
        {},
        {"tollbridge.io__role": "router"},
        {"tollbridge.io__role": "prefill", "tollbridge.io__engine": "sglang"},
        {"tollbridge.io__role": "prefill", "tollbridge.io__connector": "mooncake"},
        {f"{GRAPH}-component-type": "frontend"},
        {f"{GRAPH}-component-type": "planner"},
        {f"{DS}__role": "prefill", "leaderworkerset.sigs.k8s.io__worker-index": "1"},  # follows its leader
    ],
)
def test_pods_that_are_no_workers(labels: dict[str, str]) -> None:
    pod = parse(bare(**labels))
    assert not serves(pod)
    assert maybe_endpoint(pod, CONFIG) is None


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_has_ended(phase: str) -> None:
    pod = make_pod("p0")
    pod["status"]["phase"] = phase
    assert maybe_endpoint(parse(pod), CONFIG) is None


def test_a_pod_without_an_address_yet() -> None:
    pod = parse(make_pod("p0", ip=None))
    assert serves(pod)
    assert maybe_endpoint(pod, CONFIG) is None


def test_standing() -> None:
    pod = make_pod("p0", ready=False)
    assert endpoint(pod).standing == "not_ready"
    pod["status"]["conditions"] = [{"type": "Ready", "status": "Unknown"}]  # its node does not answer
    assert endpoint(pod).standing == "not_ready"
    pod["status"]["conditions"] = None
    assert endpoint(pod).standing == "not_ready"
    pod = make_pod("p0")
    pod["metadata"]["deletionTimestamp"] = "2026-11-29T12:00:00Z"
    assert endpoint(pod).standing == "draining"
