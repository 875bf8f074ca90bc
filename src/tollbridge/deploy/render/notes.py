"""What a person should know before applying: how long nobody serves during a rollout, and what we could not decide."""

from __future__ import annotations

from collections.abc import Iterator

from tollbridge.deploy.render.site import Site
from tollbridge.deploy.render.workers import is_scaled


def notes(site: Site) -> list[str]:
    return list(_notes(site))


def rollout(site: Site) -> str:
    """Say what a change of the workers costs, from LWS's and Kubernetes' rules for replacing them."""
    prefill, decode = site.deploy.prefill.replicas, site.deploy.decode.replicas
    if site.target == "dgd":
        return (
            "rollout: Dynamo's operator replaces workers by its own rules; watch it with `kubectl get dgd`, and keep "
            "room for one more worker of each role."
        )
    if site.deploy.spare_gpus:
        return "rollout: each new worker starts beside an old one and needs a free GPU; nothing is out of service."
    if site.target == "deployments":
        alone = [role for role, count in (("prefill", prefill), ("decode", decode)) if count == 1]
        if not alone:
            return "rollout: one worker at a time is replaced in its place; the others of its role serve."
        lost = "nobody decodes: an OUTAGE" if "decode" in alone else "prompts are prefilled where they are decoded"
        only = " and the only ".join(alone)
        return f"rollout: the only {only} worker is replaced in its place; for one model load {lost}."
    if min(prefill, decode) > 1:
        return "rollout: roles are replaced in step, in their places; workers of both revisions serve, never paired."
    return (
        "rollout: OUTAGE for one model load, because a role has one worker and no GPU is spare: a DisaggregatedSet "
        "takes all roles of a revision down together. Two workers of each role, or spare_gpus, avoid it."
    )


def _notes(site: Site) -> Iterator[str]:
    yield rollout(site)
    deploy = site.deploy
    if "@sha256:" not in deploy.images.worker:
        yield f"image: {deploy.images.worker} is a tag, which may move: pin it by digest (deploy.images.worker)."
    if deploy.cache.kind == "host_path":
        yield f"cache: {deploy.cache.path} must exist on each node and belong to user 1000."
    if site.target == "dgd" and any(is_scaled(site, role) for role in ("prefill", "decode")):
        yield "autoscale: Dynamo makes a scaling adapter of each component; point your autoscaler at it."
    if site.cluster.calibration is not None:
        yield "calibration: the file stays here; routers in the cluster learn by themselves."
