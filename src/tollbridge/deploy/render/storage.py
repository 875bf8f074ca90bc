"""Where a worker keeps things: the model cache, /dev/shm, a home, the connector that an init container brings."""

from __future__ import annotations

from tollbridge.deploy.memory import WorkerMemory
from tollbridge.deploy.render.engine import CACHE, CONFIG, HOME, PLUGIN
from tollbridge.deploy.render.quantity import quantity
from tollbridge.deploy.render.site import Manifest, Role, Site


def volumes(site: Site, role: Role, memory: WorkerMemory) -> list[Manifest]:
    found = [_cache(site, role), {"name": "home", "emptyDir": {}}]
    if has_shm(site):
        found.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": quantity(memory.shm)}})
    if has_plugin(site):
        found.append({"name": "plugin", "emptyDir": {}})
    if site.deploy.engine == "embedded":
        found.append({"name": "config", "configMap": {"name": site.named("engine")}})
    return found


def mounts(site: Site) -> list[Manifest]:
    found: list[Manifest] = [{"name": "cache", "mountPath": CACHE}, {"name": "home", "mountPath": HOME}]
    if has_shm(site):
        found.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108 (the volume's place)
    if has_plugin(site):
        found.append({"name": "plugin", "mountPath": PLUGIN, "readOnly": True})
    if site.deploy.engine == "embedded":
        found.append({"name": "config", "mountPath": CONFIG, "readOnly": True})
    return found


def claims(site: Site) -> list[Manifest]:
    """Return one PersistentVolumeClaim per role: a volume of one node cannot serve roles on two."""
    if site.deploy.cache.kind != "claim":
        return []
    return [_claim(site, role) for role in ("prefill", "decode")]


def has_plugin(site: Site) -> bool:
    """Whether an init container brings the connector into the worker's image."""
    return site.deploy.engine == "vllm" and site.deploy.connector == "tollbridge" and site.deploy.install == "init"


def has_shm(site: Site) -> bool:
    """Dynamo's operator mounts /dev/shm by itself, see `sharedMemorySize`."""
    return site.target != "dgd"


def _cache(site: Site, role: Role) -> Manifest:
    cache = site.deploy.cache
    if cache.kind == "host_path":
        return {"name": "cache", "hostPath": {"path": cache.path, "type": "Directory"}}
    if cache.kind == "download":
        return {"name": "cache", "emptyDir": {"sizeLimit": cache.size}}
    return {"name": "cache", "persistentVolumeClaim": {"claimName": site.named(f"{role}-cache")}}


def _claim(site: Site, role: str) -> Manifest:
    cache = site.deploy.cache
    spec: Manifest = {"accessModes": [cache.access], "resources": {"requests": {"storage": cache.size}}}
    if cache.storage_class is not None:
        spec["storageClassName"] = cache.storage_class
    metadata = site.metadata(site.named(f"{role}-cache"), role)
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}
