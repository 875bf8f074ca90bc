"""Who may talk to whom: workers have no password of their own on HTTP and KV events."""

from __future__ import annotations

from tollbridge.deploy.render.site import (
    EVENTS_PORT,
    HTTP_PORT,
    ROLE_LABEL,
    ROLES,
    UCX_PORTS,
    Manifest,
    Site,
)

_DNS = [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]
_API_SERVERS = [{"port": 443, "protocol": "TCP"}, {"port": 6443, "protocol": "TCP"}]


def policies(site: Site) -> list[Manifest]:
    return [_workers(site), _router(site)] if site.deploy.network_policy else []


def _workers(site: Site) -> Manifest:
    """Let routers and metrics collectors in to HTTP, workers to each other's KV ports, and nobody else.

    Routers reach KV ports too: the doctor, which is run in one of them, tries whether they answer.
    """
    kv = _kv_ports(site)
    ingress: list[Manifest] = [
        {"from": [_pods(_router_labels(site))], "ports": [*_request_ports(), *kv]},
        {"from": [_pods(_worker_labels(site))], "ports": kv},
    ]
    if site.deploy.monitoring:
        ingress.append({"from": [{"namespaceSelector": {}}], "ports": [_tcp(HTTP_PORT)]})
    egress: list[Manifest] = [{"ports": _DNS}, {"to": [_pods(_worker_labels(site))], "ports": kv}]
    if not site.deploy.cache.offline:
        egress.append({"ports": [_tcp(443)]})  # the model's hub
    return _policy(site, "workers", _worker_labels(site), ingress, egress)


def _router(site: Site) -> Manifest:
    ingress = [{"ports": [_tcp(HTTP_PORT)]}]
    ports = [*_request_ports(), *_kv_ports(site)]
    egress = [{"ports": [*_DNS, *_API_SERVERS]}, {"to": [_pods(_worker_labels(site))], "ports": ports}]
    return _policy(site, "router", _router_labels(site), ingress, egress)


def _policy(site: Site, component: str, pods: Manifest, ingress: list[Manifest], egress: list[Manifest]) -> Manifest:
    spec = {"podSelector": pods, "policyTypes": ["Ingress", "Egress"], "ingress": ingress, "egress": egress}
    metadata = site.metadata(site.named(component), component)
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec}


def _request_ports() -> list[Manifest]:
    return [_tcp(HTTP_PORT), _tcp(EVENTS_PORT, EVENTS_PORT + 1)]


def _kv_ports(site: Site) -> list[Manifest]:
    ranks = max(site.role(role).tensor_parallel for role in ROLES)
    ports = [_tcp(site.kv_port, site.kv_port + ranks - 1)]
    return ports if site.deploy.connector == "tollbridge" else [*ports, _tcp(*UCX_PORTS)]


def _tcp(first: int, last: int | None = None) -> Manifest:
    return {"port": first, "protocol": "TCP", **({"endPort": last} if last is not None and last > first else {})}


def _pods(selector: Manifest) -> Manifest:
    return {"podSelector": selector}


def _router_labels(site: Site) -> Manifest:
    return {"matchLabels": site.selector("router")}


def _worker_labels(site: Site) -> Manifest:
    roles = {"key": ROLE_LABEL, "operator": "In", "values": list(ROLES)}
    return {"matchLabels": {"app.kubernetes.io/instance": site.name}, "matchExpressions": [roles]}
