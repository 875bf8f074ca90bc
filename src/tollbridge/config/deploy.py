"""What the cluster file may say about Kubernetes: the section `deploy`, read by `tollbridge deploy render`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
Number = Annotated[int, Meta(ge=0)]
Seconds = Annotated[int, Meta(ge=0, le=86_400)]
Port = Annotated[int, Meta(ge=1, le=65535)]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the section."""


class ImagesConfig(_Section, frozen=True, kw_only=True):
    """Images by tag or, better, by digest."""

    worker: str = "vllm/vllm-openai:v0.25.1"
    router: str = "tollbridge/router:0.1.0"  # containers/router.Dockerfile; brings the connector for `install: init`
    pull: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    pull_secrets: list[str] = []


class AutoscaleConfig(_Section, frozen=True, kw_only=True):
    """A HorizontalPodAutoscaler of a role; max 0: none."""

    min: Count = 1
    max: Number = 0
    metric: str = "vllm_num_requests_waiting"  # a per-pod metric that the cluster's metrics adapter serves
    target: Count = 4  # its average over the pods


class RoleConfig(_Section, frozen=True, kw_only=True):
    """The workers of one role."""

    replicas: Count = 1
    tensor_parallel: Count = 1
    cpu: str = "4"
    memory_limit: str | None = None  # None: what the planner computes
    node_selector: dict[str, str] = {}
    tolerations: list[dict[str, Any]] = []
    args: list[str] = []  # given to the engine as they are
    env: dict[str, str] = {}
    autoscale: AutoscaleConfig = AutoscaleConfig()


class RouterDeployConfig(_Section, frozen=True, kw_only=True):
    replicas: Count = 2
    cpu: str = "1"
    memory: str = "512Mi"
    service: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    port: Port = 8000


class GpuConfig(_Section, frozen=True, kw_only=True):
    """One mechanism per node: extended resource of a device plugin, or a claim for a DRA driver."""

    mechanism: Literal["resource", "dra", "none"] = "resource"
    resource: str = "nvidia.com/gpu"
    device_class: str = "gpu.nvidia.com"
    runtime_class: str | None = None


class CacheConfig(_Section, frozen=True, kw_only=True):
    """Where workers find the model. `claim` makes a PersistentVolumeClaim of each role."""

    kind: Literal["claim", "host_path", "download"] = "claim"
    size: str = "80Gi"
    storage_class: str | None = None
    access: Literal["ReadWriteOnce", "ReadWriteMany"] = "ReadWriteOnce"
    path: str = "/var/lib/tollbridge/models"  # on each node, of kind host_path
    offline: bool = False  # filled beforehand: nothing is fetched


class MemoryConfig(_Section, frozen=True, kw_only=True):
    """What the memory limit of a worker is computed from; sizes such as 8GiB."""

    process: str | None = None  # resident memory of a worker that serves nothing; None: assumed, and said so
    shm: str | None = None  # of /dev/shm, which counts; None: 4GiB for vLLM, 64MiB for the embedded engine
    ring: str = "512MiB"  # both rings of our transfer
    concurrency: Count = 8  # requests whose KV a transport without a bound stages at once (connector nixl)
    staging_copies: Annotated[float, Meta(ge=0)] = 1.0
    model_config: str | None = None  # the model's config.json, where it is not in the local cache


class DrainConfig(_Section, frozen=True, kw_only=True):
    """How a worker leaves: routers let go, KV is fetched, running requests end, then it is killed."""

    propagation_s: Seconds = 5  # until every router has seen that the pod terminates
    handoff_s: Seconds = 60  # at most, for running requests and for KV that decode has still to fetch
    shutdown_s: Seconds = 60  # at most, from SIGTERM on


class DeployConfig(_Section, frozen=True, kw_only=True):
    """The section `deploy`."""

    name: str = "tollbridge"  # of the deployment; other names begin with it
    namespace: str = "tollbridge"
    engine: Literal["vllm", "embedded"] = "vllm"
    connector: Literal["tollbridge", "nixl"] = "tollbridge"
    install: Literal["init", "image"] = "init"  # how the connector gets into the worker's image
    revision: str | None = None  # of the model, at its hub
    max_model_len: Count | None = None
    spare_gpus: bool = False  # room for one more worker of each role, while a rollout lasts
    network_policy: bool = True
    disruption_budget: bool = True
    monitoring: bool = False  # PodMonitor and ServiceMonitor of the Prometheus operator
    hf_token_secret: str | None = None  # a Secret with the key `token`
    priority_class: str | None = None
    dynamo_runtime: str = "1.6.2"  # what a DynamoGraphDeployment is told that a plain vLLM image corresponds to
    images: ImagesConfig = ImagesConfig()
    gpu: GpuConfig = GpuConfig()
    cache: CacheConfig = CacheConfig()
    memory: MemoryConfig = MemoryConfig()
    drain: DrainConfig = DrainConfig()
    router: RouterDeployConfig = RouterDeployConfig()
    prefill: RoleConfig = RoleConfig()
    decode: RoleConfig = RoleConfig()
