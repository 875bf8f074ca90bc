"""The pod of a worker: one container with the engine, what it needs around it, and how it leaves."""

from __future__ import annotations

import hashlib
import json

from tollbridge.deploy.memory import WorkerMemory
from tollbridge.deploy.render import storage
from tollbridge.deploy.render.engine import CACHE, CONFIG, engine_of
from tollbridge.deploy.render.quantity import quantity
from tollbridge.deploy.render.site import (
    EVENTS_PORT,
    HTTP_PORT,
    REVISION_LABEL,
    ROLE_LABEL,
    ROLES,
    USER,
    Manifest,
    Role,
    Site,
)

MAIN = "main"  # the name that Dynamo's operator looks for
CLAIM = "gpu"
SLACK_S = 15  # between the last deadline of a leaving worker and the end of its pod
NIXL_LEASE_S = 30  # how long a prefill worker keeps KV that decode has not fetched
POD_SECURITY: Manifest = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "fsGroupChangePolicy": "OnRootMismatch",  # a model cache is large
    "seccompProfile": {"type": "RuntimeDefault"},
}
_GPU_TAINT = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


def templates(site: Site, memory: dict[Role, WorkerMemory], extra: object = None) -> dict[Role, Manifest]:
    """Return the pod template of each role, both labelled with one revision: that of both templates and of `extra`."""
    specs = {role: pod_spec(site, role, memory[role]) for role in ROLES}
    content = json.dumps([specs, extra], sort_keys=True)
    revision = hashlib.sha256(content.encode()).hexdigest()[:8]
    return {role: _template(site, role, specs[role], revision) for role in ROLES}


def pod_spec(site: Site, role: Role, memory: WorkerMemory) -> Manifest:
    deploy, settings = site.deploy, site.role(role)
    spec: Manifest = {
        "serviceAccountName": site.named("worker"),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # a Service called vllm would set VLLM_PORT
        "securityContext": POD_SECURITY,
        "terminationGracePeriodSeconds": grace_s(site),
    }
    if deploy.images.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in deploy.images.pull_secrets]
    if deploy.priority_class is not None:
        spec["priorityClassName"] = deploy.priority_class
    if deploy.gpu.runtime_class is not None and has_gpu(site):
        spec["runtimeClassName"] = deploy.gpu.runtime_class
    if settings.node_selector:
        spec["nodeSelector"] = dict(settings.node_selector)
    tolerations = ([_GPU_TAINT] if has_gpu(site) else []) + list(settings.tolerations)
    if tolerations:
        spec["tolerations"] = tolerations
    if deploy.gpu.mechanism == "dra":
        spec["resourceClaims"] = [{"name": CLAIM, "resourceClaimTemplateName": claim_template_name(site, role)}]
    spec["initContainers"] = _init_containers(site, role)
    spec["containers"] = [_main(site, role, memory)]
    spec["volumes"] = storage.volumes(site, role, memory)
    return {key: value for key, value in spec.items() if value != []}


def grace_s(site: Site) -> int:
    drain = site.deploy.drain
    leaving_s = drain.handoff_s if site.deploy.connector == "tollbridge" else NIXL_LEASE_S
    return drain.propagation_s + leaving_s + drain.shutdown_s + SLACK_S


def has_gpu(site: Site) -> bool:
    return site.deploy.gpu.mechanism != "none"


def claim_template_name(site: Site, role: Role) -> str:
    return site.named(f"{role}-gpu")


def container_security(*, read_only: bool) -> Manifest:
    """Return what a container is denied. Of a worker the root file system is writable: nvidia-cdi-hook writes to it."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": read_only,
        "capabilities": {"drop": ["ALL"]},
    }


def _template(site: Site, role: Role, spec: Manifest, revision: str) -> Manifest:
    labels = {**site.labels(role), ROLE_LABEL: role, REVISION_LABEL: revision}
    return {"metadata": {"labels": labels}, "spec": spec}


def _main(site: Site, role: Role, memory: WorkerMemory) -> Manifest:
    engine = engine_of(site, role)
    return {
        "name": MAIN,
        "image": site.deploy.images.worker,
        "imagePullPolicy": site.deploy.images.pull,
        "command": engine.command,
        "args": engine.args,
        "env": engine.env,
        "ports": _ports(site, role),
        "resources": _resources(site, role, memory),
        "startupProbe": _probe(period_s=10, failures=360),  # an hour to load the model
        "readinessProbe": _probe(period_s=5, failures=3),
        "livenessProbe": _probe(period_s=20, failures=6),  # a busy engine is slow to answer, not dead
        "lifecycle": {"preStop": _pre_stop(site)},
        "securityContext": container_security(read_only=False),
        "volumeMounts": storage.mounts(site),
    }


def _ports(site: Site, role: Role) -> list[Manifest]:
    ports = [_port("http", HTTP_PORT)]
    name = "kv" if site.deploy.connector == "tollbridge" else "nixl"
    ranks = range(site.role(role).tensor_parallel)
    ports += [_port(f"{name}-{rank}" if rank else name, site.kv_port + rank) for rank in ranks]
    return [*ports, _port("events", EVENTS_PORT), _port("replay", EVENTS_PORT + 1)]


def _port(name: str, number: int) -> Manifest:
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def _resources(site: Site, role: Role, memory: WorkerMemory) -> Manifest:
    """Request what is limited: a worker that loses memory to its neighbours dies in the middle of everything."""
    settings = site.role(role)
    limit = settings.memory_limit or quantity(memory.limit)
    requests, limits = {"cpu": settings.cpu, "memory": limit}, {"memory": limit}
    if site.deploy.cache.kind == "download":
        requests["ephemeral-storage"] = site.deploy.cache.size
    if site.deploy.gpu.mechanism == "dra":
        return {"requests": requests, "limits": limits, "claims": [{"name": CLAIM}]}
    if site.deploy.gpu.mechanism == "resource":
        gpus = {site.deploy.gpu.resource: settings.tensor_parallel}
        return {"requests": {**requests, **gpus}, "limits": {**limits, **gpus}}
    return {"requests": requests, "limits": limits}


def _probe(*, period_s: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": "/health", "port": "http"},
        "periodSeconds": period_s,
        "timeoutSeconds": min(period_s, 10),
        "failureThreshold": failures,
    }


def _pre_stop(site: Site) -> Manifest:
    """The kubelet waits for this before it sends SIGTERM; until then the engine serves on."""
    drain = site.deploy.drain
    if site.deploy.connector != "tollbridge":
        return {"sleep": {"seconds": drain.propagation_s + NIXL_LEASE_S}}
    command = ["python3", "-m", "tollbridge.deploy.drain", "--port", str(HTTP_PORT)]
    command += ["--propagation-s", str(drain.propagation_s), "--handoff-s", str(drain.handoff_s)]
    return {"exec": {"command": command}}


def _init_containers(site: Site, role: Role) -> list[Manifest]:
    if storage.has_plugin(site):
        copy = ["cp", "-r", "/opt/tollbridge/plugin/.", "/plugin/"]
        return [_init(site, "connector", site.deploy.images.router, copy, [{"name": "plugin", "mountPath": "/plugin"}])]
    if site.deploy.engine == "embedded" and not site.deploy.cache.offline:
        mounts: list[Manifest] = [
            {"name": "cache", "mountPath": CACHE},
            {"name": "config", "mountPath": CONFIG, "readOnly": True},
        ]
        pull = ["tollbridge", "model", "pull", site.cluster.model]
        return [_init(site, "model", site.deploy.images.worker, pull, mounts)]
    return []


def _init(site: Site, name: str, image: str, command: list[str], mounts: list[Manifest]) -> Manifest:
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": site.deploy.images.pull,
        "command": command,
        "env": [{"name": "TOLLBRIDGE_HOME", "value": CACHE}, {"name": "HOME", "value": CACHE}],
        "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"memory": "1Gi"}},
        "securityContext": container_security(read_only=False),
        "volumeMounts": mounts,
    }
