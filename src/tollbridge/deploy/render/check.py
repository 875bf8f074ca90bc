"""What a cluster file must not say when it is deployed; each problem is one ConfigError."""

from __future__ import annotations

import re

from tollbridge.deploy.render.quantity import maybe_quantity
from tollbridge.deploy.render.site import ROLES, Role, Site
from tollbridge.errors import ConfigError

LONGEST_NAME = 32  # LWS names pods NAME-0-REVISION-ROLE, and 51 characters is what a StatefulSet's labels leave of 63
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # a Service begins with a letter
_FLAGS = ("--tensor-parallel-size", "-tp", "--max-model-len", "--revision", "--shutdown-timeout", "--dtype")


def check(site: Site) -> None:
    """Raise ConfigError for the first problem of the section `deploy`."""
    deploy = site.deploy
    _require(_is_name(deploy.name), "name", deploy.name, f"lower-case letters, digits, hyphens, {LONGEST_NAME} at most")
    _require(_is_name(deploy.namespace, 63), "namespace", deploy.namespace, "lower-case letters, digits and hyphens")
    _check_engine(site)
    for role in ROLES:
        _check_role(site, role)
    prefill, decode = deploy.prefill.tensor_parallel, deploy.decode.tensor_parallel
    if deploy.connector == "tollbridge" and prefill != decode:
        raise ConfigError(
            f"deploy.prefill.tensor_parallel is {prefill} and deploy.decode.tensor_parallel {decode}: with the "
            "connector tollbridge every rank sends to its like, so write the same number."
        )
    if prefill > decode:
        raise ConfigError(
            f"deploy.prefill.tensor_parallel is {prefill}, above decode's {decode}: NIXL splits KV heads among more "
            "ranks, never joins them, so prefill may have at most as many as decode."
        )
    if site.cluster.router.tls is not None or site.cluster.transfer.tls is not None:
        raise ConfigError(
            "tls names files of one machine, which no pod has: end TLS at an ingress, and leave it out here."
        )


def _check_engine(site: Site) -> None:
    deploy = site.deploy
    if deploy.engine == "embedded" and deploy.gpu.mechanism != "none":
        raise ConfigError("deploy.engine embedded computes on the CPU: set deploy.gpu.mechanism to none.")
    if deploy.engine == "embedded" and deploy.connector != "tollbridge":
        raise ConfigError("deploy.connector nixl is vLLM's: with deploy.engine embedded leave the key out.")
    if deploy.engine == "vllm" and site.cluster.model in ("smollm2", "tiny"):
        raise ConfigError(
            f"model is {site.cluster.model}, which only the embedded engine has: name a hub id for vLLM, such as "
            "Qwen/Qwen2.5-7B-Instruct."
        )
    if deploy.engine == "vllm" and deploy.install == "image" and deploy.images.worker.startswith("vllm/"):
        raise ConfigError("deploy.install is image, but deploy.images.worker is vLLM's own, without the connector.")
    if deploy.engine == "vllm" and deploy.gpu.mechanism == "none" and "cpu" not in deploy.images.worker:
        raise ConfigError("deploy.gpu.mechanism is none, but deploy.images.worker is not a vLLM for CPUs.")


def _check_role(site: Site, role: Role) -> None:
    settings = site.role(role)
    for key in ("cpu", "memory_limit"):
        value = getattr(settings, key)
        _require(value is None or maybe_quantity(value) is not None, f"{role}.{key}", value, "a quantity such as 16Gi")
    own = next((each for each in settings.args if each.partition("=")[0] in _FLAGS), None)
    if own is not None and site.deploy.engine == "vllm":
        raise ConfigError(f"deploy.{role}.args has {own}, which has a key of its own in deploy: set that.")
    if settings.args and site.deploy.engine == "embedded":
        raise ConfigError(f"deploy.{role}.args is for vLLM: the embedded engine is set in the section engine.")
    cache = site.deploy.cache
    pinned = "kubernetes.io/hostname" in settings.node_selector
    most = max(settings.replicas, settings.autoscale.max)
    if cache.kind == "claim" and cache.access == "ReadWriteOnce" and most > 1 and not pinned:
        raise ConfigError(
            f"deploy.{role} has {most} workers and a cache volume for one node (ReadWriteOnce): set deploy.cache.kind "
            "to host_path or download, deploy.cache.access to ReadWriteMany, or pin the role by node_selector."
        )
    if 0 < settings.autoscale.max < settings.autoscale.min:
        raise ConfigError(f"deploy.{role}.autoscale.max is below its min: raise it, or write 0 for no autoscaler.")


def _is_name(text: str, longest: int = LONGEST_NAME) -> bool:
    return len(text) <= longest and _NAME.fullmatch(text) is not None


def _require(condition: bool, key: str, value: object, wanted: str) -> None:
    if not condition:
        raise ConfigError(f"deploy.{key} is {value!r}: write {wanted}.")
