"""What the Prometheus operator is told: pods for workers (LWS's Services have no ports), a Service for the router."""

from __future__ import annotations

from tollbridge.deploy.render.site import REVISION_LABEL, ROLE_LABEL, ROLES, Manifest, Site

_API = "monitoring.coreos.com/v1"


def monitors(site: Site) -> list[Manifest]:
    return [_workers(site), _router(site)] if site.deploy.monitoring else []


def _workers(site: Site) -> Manifest:
    roles = {"key": ROLE_LABEL, "operator": "In", "values": list(ROLES)}
    selector = {"matchLabels": {"app.kubernetes.io/instance": site.name}, "matchExpressions": [roles]}
    relabel = [_relabel(ROLE_LABEL, "role"), _relabel(REVISION_LABEL, "revision")]
    endpoint = {"port": "http", "path": "/metrics", "interval": "15s", "relabelings": relabel}
    spec = {"selector": selector, "podMetricsEndpoints": [endpoint]}
    metadata = site.metadata(site.named("workers"), "workers")
    return {"apiVersion": _API, "kind": "PodMonitor", "metadata": metadata, "spec": spec}


def _router(site: Site) -> Manifest:
    spec = {
        "selector": {"matchLabels": site.labels("router")},
        "endpoints": [{"port": "http", "path": "/metrics", "interval": "15s"}],
    }
    metadata = site.metadata(site.named("router"), "router")
    return {"apiVersion": _API, "kind": "ServiceMonitor", "metadata": metadata, "spec": spec}


def _relabel(label: str, target: str) -> Manifest:
    source = "__meta_kubernetes_pod_label_" + "".join(c if c.isalnum() else "_" for c in label)
    return {"sourceLabels": [source], "targetLabel": target}
