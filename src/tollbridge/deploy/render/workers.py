"""The object that keeps the workers of both roles running, one kind per target, and how it rolls out."""

from __future__ import annotations

from tollbridge.deploy.memory import WorkerMemory
from tollbridge.deploy.render.quantity import quantity
from tollbridge.deploy.render.site import ROLES, Manifest, Role, Site

DS_API = "disaggregatedset.x-k8s.io/v1"


def workers(site: Site, templates: dict[Role, Manifest], memory: dict[Role, WorkerMemory]) -> list[Manifest]:
    if site.target == "disaggregatedset":
        return [_disaggregated_set(site, templates)]
    if site.target == "dgd":
        return [_dynamo_graph(site, templates, memory)]
    return [_deployment(site, role, templates[role]) for role in ROLES]


def is_scaled(site: Site, role: Role) -> bool:
    """Whether something else than the manifest says how many workers there are."""
    return site.role(role).autoscale.max > 0


def surge(site: Site) -> Manifest:
    """Return how a rollout replaces a worker: beside the old one where there are GPUs to spare, else in its place.

    Without this, Kubernetes and LWS both wait for a spare GPU, on a full cluster for ever.
    """
    return {"maxSurge": 1, "maxUnavailable": 0} if site.deploy.spare_gpus else {"maxSurge": 0, "maxUnavailable": 1}


def _disaggregated_set(site: Site, templates: dict[Role, Manifest]) -> Manifest:
    roles = [_ds_role(site, role, templates[role]) for role in ROLES]
    spec = {"slices": 1, "placementPolicy": {"type": "None"}, "roles": roles}
    return {
        "apiVersion": DS_API,
        "kind": "DisaggregatedSet",
        "metadata": site.metadata(site.name, "workers"),
        "spec": spec,
    }


def _ds_role(site: Site, role: Role, template: Manifest) -> Manifest:
    group: Manifest = {"size": 1, "restartPolicy": "None", "workerTemplate": template}  # a restart keeps IP and claim
    spec: Manifest = {
        "leaderWorkerTemplate": group,
        "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": surge(site)},
    }
    if is_scaled(site, role):
        return {"name": role, "scaling": {"mode": "External"}, "spec": spec}
    return {"name": role, "spec": {"replicas": site.role(role).replicas, **spec}}


def _deployment(site: Site, role: Role, template: Manifest) -> Manifest:
    spec: Manifest = {
        "selector": {"matchLabels": site.selector(role)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": surge(site)},
        "progressDeadlineSeconds": 3700,  # longer than the startup probe allows for
        "template": template,
    }
    if not is_scaled(site, role):
        spec = {"replicas": site.role(role).replicas, **spec}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": site.metadata(site.named(role), role),
        "spec": spec,
    }


def _dynamo_graph(site: Site, templates: dict[Role, Manifest], memory: dict[Role, WorkerMemory]) -> Manifest:
    components = [_component(site, role, templates[role], memory[role]) for role in ROLES]
    spec: Manifest = {"components": components}
    if site.deploy.engine == "vllm":
        spec = {"backendFramework": "vllm", **spec}
    metadata = site.metadata(site.name, "workers")
    return {"apiVersion": "nvidia.com/v1beta1", "kind": "DynamoGraphDeployment", "metadata": metadata, "spec": spec}


def _component(site: Site, role: Role, template: Manifest, memory: WorkerMemory) -> Manifest:
    component: Manifest = {
        "name": role,
        "type": role,
        "replicas": site.role(role).replicas,
        "runtimeVersionOverride": site.deploy.dynamo_runtime,  # the tag of a plain vLLM image says nothing to Dynamo
        "sharedMemorySize": quantity(memory.shm),
        "podTemplate": template,
    }
    return {**component, "scalingAdapter": {}} if is_scaled(site, role) else component
