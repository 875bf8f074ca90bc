"""The router: a small Deployment that reads the pods of its namespace, and the Service that clients use."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import yaml

from tollbridge.deploy.render.engine import CONFIG, secret_variable
from tollbridge.deploy.render.pods import POD_SECURITY, container_security
from tollbridge.deploy.render.site import EVENTS_PORT, HTTP_PORT, KV_PORT, ROLE_LABEL, Manifest, Role, Site

COMPONENT = "router"
FILE = "tollbridge.yaml"
STOP_S = 60  # for running requests
PROPAGATION_S = 10  # until no client is sent here any more
_OWN = {
    "workers",
    "deploy",
    "discovery",
    "calibration",
    "links",
    "engine",
}  # of the cluster file, and none of the router's


def objects(site: Site) -> list[Manifest]:
    return [*_rights(site), _config(site), _service(site), _deployment(site)]


def settings(site: Site) -> dict[str, Any]:
    """Return the cluster file of the router's pods."""
    tree: dict[str, Any] = msgspec.to_builtins(site.cluster)
    kept = {key: value for key, value in tree.items() if key not in _OWN}
    discovery = {
        "kind": "kubernetes",
        "selector": f"app.kubernetes.io/instance={site.name},{ROLE_LABEL}",
        "engine": site.deploy.engine,
        "connector": site.deploy.connector,
    }
    return {
        **kept,
        "router": {**tree["router"], "host": "0.0.0.0", "port": HTTP_PORT},  # noqa: S104 (of the pod)
        "secret": {"env": secret_variable(site)["name"]},
        "discovery": discovery,
    }


def engine_config(site: Site) -> list[Manifest]:
    """Return the cluster files of embedded workers, a key for each role."""
    if site.deploy.engine != "embedded":
        return []
    data = {f"{role}.yaml": dump(_worker_settings(site, role)) for role in ("prefill", "decode")}
    metadata = site.metadata(site.named("engine"), "workers")
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}]


def dump(tree: object) -> str:
    return yaml.safe_dump(tree, sort_keys=False, width=120)


def _worker_settings(site: Site, role: Role) -> dict[str, Any]:
    tree: dict[str, Any] = msgspec.to_builtins(site.cluster)
    worker = {
        "name": role,
        "prefer": role,
        "url": f"http://0.0.0.0:{HTTP_PORT}",
        "kv": f"0.0.0.0:{KV_PORT}",
        "events": f"tcp://0.0.0.0:{EVENTS_PORT}",
        "replay": f"tcp://0.0.0.0:{EVENTS_PORT + 1}",
    }
    kept = {key: tree[key] for key in ("model", "dtype", "transfer", "engine")}
    return {**kept, "secret": {"env": secret_variable(site)["name"]}, "workers": [worker]}


def _rights(site: Site) -> list[Manifest]:
    metadata = site.metadata(site.named(COMPONENT), COMPONENT)
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    subject = {"kind": "ServiceAccount", "name": site.named(COMPONENT), "namespace": site.deploy.namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": site.named(COMPONENT)}
    api = "rbac.authorization.k8s.io/v1"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata, "automountServiceAccountToken": False},
        {"apiVersion": api, "kind": "Role", "metadata": metadata, "rules": [rule]},
        {"apiVersion": api, "kind": "RoleBinding", "metadata": metadata, "subjects": [subject], "roleRef": role},
    ]


def _config(site: Site) -> Manifest:
    """Return the router's file: in a Secret when there are API keys in it."""
    metadata, data = site.metadata(site.named(COMPONENT), COMPONENT), {FILE: dump(settings(site))}
    if _has_keys(site):
        return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "stringData": data}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _has_keys(site: Site) -> bool:
    return bool(site.cluster.router.api_keys or site.cluster.router.tenants)


def _service(site: Site) -> Manifest:
    own = site.deploy.router
    spec = {
        "type": own.service,
        "selector": site.selector(COMPONENT),
        "ports": [{"name": "http", "port": own.port, "targetPort": "http", "protocol": "TCP"}],
    }
    metadata = site.metadata(site.named(COMPONENT), COMPONENT)
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def _deployment(site: Site) -> Manifest:
    checksum = hashlib.sha256(dump(settings(site)).encode()).hexdigest()[:16]
    template = {
        "metadata": {"labels": site.labels(COMPONENT), "annotations": {"tollbridge.io/config": checksum}},
        "spec": _pod(site),
    }
    spec = {
        "replicas": site.deploy.router.replicas,
        "selector": {"matchLabels": site.selector(COMPONENT)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "progressDeadlineSeconds": 3700,  # a router is ready once a worker is, and that one loads a model first
        "template": template,
    }
    metadata = site.metadata(site.named(COMPONENT), COMPONENT)
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}


def _pod(site: Site) -> Manifest:
    source = {"secret": {"secretName": site.named(COMPONENT)}}
    if not _has_keys(site):
        source = {"configMap": {"name": site.named(COMPONENT)}}
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": site.selector(COMPONENT)},
    }
    spec: Manifest = {
        "serviceAccountName": site.named(COMPONENT),
        "automountServiceAccountToken": True,  # it watches pods
        "enableServiceLinks": False,
        "securityContext": POD_SECURITY,
        "terminationGracePeriodSeconds": PROPAGATION_S + STOP_S,
        "topologySpreadConstraints": [spread],
        "containers": [_container(site)],
        "volumes": [{"name": "config", **source}, {"name": "tmp", "emptyDir": {}}],
    }
    if site.deploy.images.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in site.deploy.images.pull_secrets]
    return spec


def _container(site: Site) -> Manifest:
    own = site.deploy.router
    return {
        "name": COMPONENT,
        "image": site.deploy.images.router,
        "imagePullPolicy": site.deploy.images.pull,
        "command": ["tollbridge"],
        "args": ["router", "--config", f"{CONFIG}/{FILE}"],
        "env": [secret_variable(site), {"name": "HOME", "value": "/tmp"}],  # noqa: S108 (a volume)
        "ports": [{"name": "http", "containerPort": HTTP_PORT, "protocol": "TCP"}],
        "resources": {"requests": {"cpu": own.cpu, "memory": own.memory}, "limits": {"memory": own.memory}},
        "readinessProbe": _probe("/health", period_s=5, failures=3),  # a worker can serve
        "livenessProbe": _probe("/metrics", period_s=20, failures=6),  # the router itself answers
        "lifecycle": {"preStop": {"sleep": {"seconds": PROPAGATION_S}}},
        "securityContext": container_security(read_only=True),
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 (a volume)
        ],
    }


def _probe(path: str, *, period_s: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
