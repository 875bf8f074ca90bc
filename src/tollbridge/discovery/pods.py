"""From a pod to a worker. Pure.

Which pods serve, in which role and of which revision, stands in their labels: our own, or those that a DisaggregatedSet
(LeaderWorkerSet) or a DynamoGraphDeployment gives its pods. Where they listen stands in their named ports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from tollbridge.config.address import Address
from tollbridge.config.cluster import DiscoveryConfig, WorkerConfig
from tollbridge.discovery.base import Endpoint, Standing

ROLE, REVISION = "tollbridge.io/role", "tollbridge.io/revision"
ENGINE, CONNECTOR = "tollbridge.io/engine", "tollbridge.io/connector"
_SET_ROLE, _SET_REVISION = "disaggregatedset.x-k8s.io/role", "disaggregatedset.x-k8s.io/revision"
_GRAPH_TYPE, _GRAPH_SUB_TYPE = "nvidia.com/dynamo-component-type", "nvidia.com/dynamo-sub-component-type"
_GRAPH_REVISION = "nvidia.com/dynamo-worker-hash"
_WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"  # only the leader of a group listens
_ROLES = (ROLE, _SET_ROLE, _GRAPH_SUB_TYPE, _GRAPH_TYPE)  # the first that a pod has counts
_REVISIONS = (REVISION, _SET_REVISION, _GRAPH_REVISION)

Prefer = Literal["prefill", "decode", "any"]
_PREFERS: Mapping[str, Prefer] = {
    "prefill": "prefill",
    "decode": "decode",
    "both": "any",
    "any": "any",
    "worker": "any",  # of a graph that does not separate them
}


class _Part(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A part of a pod, of which only some fields are read. Absent and null are the same."""


class Port(_Part, frozen=True, kw_only=True):
    name: str | None = None
    container_port: int


class Container(_Part, frozen=True, kw_only=True):
    ports: list[Port] | None = None


class Condition(_Part, frozen=True, kw_only=True):
    type: str
    status: str


class Metadata(_Part, frozen=True, kw_only=True):
    name: str
    uid: str = ""
    labels: dict[str, str] | None = None
    resource_version: str = ""
    deletion_timestamp: str | None = None


class Spec(_Part, frozen=True, kw_only=True):
    node_name: str | None = None
    containers: list[Container] | None = None


class Status(_Part, frozen=True, kw_only=True):
    phase: str = ""
    pod_ip: str | None = msgspec.field(name="podIP", default=None)
    conditions: list[Condition] | None = None


class Pod(_Part, frozen=True, kw_only=True):
    metadata: Metadata
    spec: Spec = Spec()
    status: Status = Status()

    @property
    def labels(self) -> Mapping[str, str]:
        return self.metadata.labels or {}


def serves(pod: Pod) -> bool:
    """Return whether the pod is a worker at all: its role, engine and connector are known, and it leads its group."""
    return (
        _first(pod, _ROLES) in _PREFERS
        and pod.labels.get(ENGINE, "vllm") in ("embedded", "vllm")
        and pod.labels.get(CONNECTOR, "tollbridge") in ("tollbridge", "nixl", "nixl-push")
        and pod.labels.get(_WORKER_INDEX, "0") == "0"
    )


def maybe_endpoint(pod: Pod, config: DiscoveryConfig) -> Endpoint | None:
    """Return the worker that the pod is; None when it is none, has no address yet or has ended."""
    if not serves(pod) or not pod.status.pod_ip or pod.status.phase in ("Succeeded", "Failed"):
        return None
    return Endpoint(worker=_worker(pod, pod.status.pod_ip, config), uid=pod.metadata.uid, standing=_standing(pod))


def _worker(pod: Pod, ip: str, config: DiscoveryConfig) -> WorkerConfig:
    ports = {port.name: port.container_port for each in pod.spec.containers or () for port in each.ports or ()}
    engine = pod.labels.get(ENGINE, config.engine)
    connector = pod.labels.get(CONNECTOR, config.connector if engine == "vllm" else "tollbridge")
    kv = ports.get("kv", config.kv_port if engine == "vllm" else 0)  # the embedded engine says where it listens
    replay = ports.get("replay")
    return WorkerConfig(
        name=pod.metadata.name,
        prefer=_PREFERS[_first(pod, _ROLES)],
        engine=engine,  # type: ignore[arg-type]
        connector=connector,  # type: ignore[arg-type]
        url=f"http://{Address(host=ip, port=ports.get('http', config.http_port))}",
        kv=str(Address(host=ip, port=kv)),
        events=f"tcp://{Address(host=ip, port=ports.get('events', 0))}",
        replay=f"tcp://{Address(host=ip, port=replay)}" if replay else None,
        host=pod.spec.node_name or ip,
        revision=_first(pod, _REVISIONS),
    )


def _standing(pod: Pod) -> Standing:
    if pod.metadata.deletion_timestamp is not None:
        return "draining"
    ready = any(each.type == "Ready" and each.status == "True" for each in pod.status.conditions or ())
    return "serving" if ready else "not_ready"


def _first(pod: Pod, labels: tuple[str, ...]) -> str:
    return next((pod.labels[label] for label in labels if label in pod.labels), "")
