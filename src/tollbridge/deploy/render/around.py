"""What stands around the workers: account, claims of GPUs, headless Services, disruption budgets, autoscalers."""

from __future__ import annotations

from tollbridge.deploy.render.pods import claim_template_name
from tollbridge.deploy.render.site import HTTP_PORT, ROLES, Manifest, Role, Site
from tollbridge.deploy.render.workers import DS_API, is_scaled


def namespace(site: Site) -> Manifest:
    metadata = {"name": site.deploy.namespace, "labels": site.labels("namespace")}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}


def account(site: Site) -> Manifest:
    metadata = site.metadata(site.named("worker"), "workers")
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata,
        "automountServiceAccountToken": False,
    }


def gpu_claims(site: Site) -> list[Manifest]:
    return [_gpu_claim(site, role) for role in ROLES] if site.deploy.gpu.mechanism == "dra" else []


def services(site: Site) -> list[Manifest]:
    """Return a headless Service per role, with ports, over all revisions; LWS's own have none, and change names."""
    return [_service(site, role) for role in ROLES]


def budgets(site: Site) -> list[Manifest]:
    """Return a budget per role. Its form lets a node be drained also where a role has one worker."""
    if not site.deploy.disruption_budget:
        return []
    return [budget(site, role) for role in (*ROLES, "router")]


def budget(site: Site, component: str) -> Manifest:
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": site.selector(component)}}
    metadata = site.metadata(site.named(component), component)
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata, "spec": spec}


def autoscalers(site: Site) -> list[Manifest]:
    """Return an autoscaler of each role that has one. Dynamo's adapter takes none of ours: see the notes."""
    if site.target == "dgd":
        return []
    return [_autoscaler(site, role) for role in ROLES if is_scaled(site, role)]


def _gpu_claim(site: Site, role: Role) -> Manifest:
    exactly = {"deviceClassName": site.deploy.gpu.device_class, "count": site.role(role).tensor_parallel}
    exactly["allocationMode"] = "ExactCount"
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": site.metadata(claim_template_name(site, role), role),
        "spec": {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}},
    }


def _service(site: Site, role: Role) -> Manifest:
    ports = [("http", HTTP_PORT)] + ([("kv", site.kv_port)] if site.deploy.connector == "tollbridge" else [])
    spec = {
        "clusterIP": "None",
        "selector": site.selector(role),
        "ports": [{"name": name, "port": number, "targetPort": name, "protocol": "TCP"} for name, number in ports],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": site.metadata(site.named(role), role), "spec": spec}


def _autoscaler(site: Site, role: Role) -> Manifest:
    wanted = site.role(role).autoscale
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": site.named(role)}
    if site.target == "disaggregatedset":
        target = {"apiVersion": DS_API, "kind": "DisaggregatedSetRoleScaler", "name": site.named(role)}
    value = {"type": "AverageValue", "averageValue": str(wanted.target)}
    metric = {"type": "Pods", "pods": {"metric": {"name": wanted.metric}, "target": value}}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": site.metadata(site.named(role), role),
        "spec": {
            "scaleTargetRef": target,
            "minReplicas": wanted.min,
            "maxReplicas": wanted.max,
            "metrics": [metric],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 600}},  # a model takes minutes to load
        },
    }
