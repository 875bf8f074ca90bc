"""DisaggregatedSet and LeaderWorkerSet: what their webhooks refuse, what their controllers choke on, and rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tollbridge.deploy.lint.case import Case
from tollbridge.deploy.lint.findings import Document, Finding, Manifest, at, items
from tollbridge.deploy.lint.rules.devices import gpus

LONGEST_SERVICE = 47  # set and role: NAME-S-REVISION8-ROLE-prv is a Service, 63 at most
LONGEST_STATEFUL = 39  # set and role: the StatefulSet's pods carry NAME-S-REVISION8-ROLE and a hash as a label
_EXCLUSIVE = "leaderworkerset.sigs.k8s.io/exclusive-topology"
_STALL = "a new worker waits for a spare GPU, on a full cluster for ever; there is no deadline"
_STALL_MEND = (
    "write maxSurge: 0, maxUnavailable: 1 (in its place), or maxSurge: 1, maxUnavailable: 0 where GPUs are spare"
)


def rules(case: Case) -> Iterator[Finding]:
    for each in case.of("DisaggregatedSet"):
        yield from _names(each)
        yield from _placement(each)
        yield from _scaling(case, each)
        for index, role in enumerate(items(each.spec, "roles")):
            yield from _strategy(each, f"spec.roles[{index}].spec.rolloutStrategy", role.get("spec"), in_set=True)
            yield from _group(each, f"spec.roles[{index}].spec", role.get("spec"))
    for each in case.of("LeaderWorkerSet"):
        if len(each.name) > 51:
            yield each.finding(
                "generated-length",
                "metadata.name",
                what=f"the name has {len(each.name)} characters",
                why="names of StatefulSet and pods are made from it, and become labels of 63",
                mend="51 at most",
            )
        yield from _strategy(each, "spec.rolloutStrategy", each.spec, in_set=False)
        yield from _group(each, "spec", each.spec)
    yield from _siblings(case)
    for scaler in case.of("HorizontalPodAutoscaler"):
        yield from _scaler(case, scaler)


def _scaler(case: Case, scaler: Document) -> Iterator[Finding]:
    low, high = scaler.spec.get("minReplicas", 1), scaler.spec.get("maxReplicas")
    if isinstance(low, int) and isinstance(high, int) and low > high:
        yield scaler.finding(
            "scaling",
            "spec.maxReplicas",
            what=f"maxReplicas is {high}, below minReplicas, {low}",
            why="the API server refuses it",
            mend="raise maxReplicas",
        )
    target = at(scaler.spec, ["scaleTargetRef"]) or {}
    names = [each.name for each in case.of(str(target.get("kind"))) if each.namespace == scaler.namespace]
    if names and target.get("name") not in names:
        yield scaler.finding(
            "scaling",
            "spec.scaleTargetRef.name",
            what=f"there is no {target.get('kind')} {target.get('name')}",
            why="the autoscaler reports an error, and does nothing",
            mend=f"name one of {', '.join(names)}",
        )


def _names(document: Document) -> Iterator[Finding]:
    for index, role in enumerate(items(document.spec, "roles")):
        name = str(role.get("name", ""))
        length = len(document.name) + len(name)
        most = LONGEST_STATEFUL if (at(role, ["spec", "leaderWorkerTemplate", "size"]) or 1) > 1 else 42
        if length > most:
            what = f"{document.name} and {name} have {length} characters together"
            made = len(document.name) + len(name) + 12
            yield document.finding(
                "generated-length",
                f"spec.roles[{index}].name",
                what=what,
                why=f"LWS makes {document.name}-0-xxxxxxxx-{name} ({made}) of them, and labels and a Service from it; "
                "the object is admitted, and its controller fails for ever",
                mend=f"shorten the name: {most} characters with the role at most",
            )


def _placement(document: Document) -> Iterator[Finding]:
    kind, topology = (at(document.spec, ["placementPolicy", key]) for key in ("type", "topology"))
    if kind not in (None, "None") and not topology:
        yield document.finding(
            "placement",
            "spec.placementPolicy.topology",
            what=f"placementPolicy {kind} has no topology",
            why="the webhook refuses it",
            mend="add topology: kubernetes.io/hostname, or another node label",
        )
    if kind not in (None, "None") and _EXCLUSIVE in str(document.manifest):
        yield document.finding(
            "placement",
            "spec.placementPolicy",
            what="placementPolicy and LWS's exclusive-topology annotation together",
            why="the webhook refuses it",
            mend="keep one of them",
        )


def _scaling(case: Case, document: Document) -> Iterator[Finding]:
    external = [str(role.get("name")) for role in items(document.spec, "roles") if _is_external(role)]
    if external and int(document.spec.get("slices") or 1) > 1:
        yield document.finding(
            "scaling",
            "spec.slices",
            what=f"{', '.join(external)} is scaled from outside, and there are several slices",
            why="the webhook refuses it",
            mend="slices: 1, or scaling.mode: Static",
        )
    for scaler in case.of("HorizontalPodAutoscaler"):
        target = at(scaler.spec, ["scaleTargetRef"]) or {}
        if scaler.namespace != document.namespace:
            continue
        if target.get("kind") == "DisaggregatedSet" and target.get("name") == document.name:
            yield scaler.finding(
                "scaling",
                "spec.scaleTargetRef",
                what="a DisaggregatedSet has no scale of its own",
                why="the autoscaler does nothing but report an error",
                mend=f"scaling.mode: External, and target the DisaggregatedSetRoleScaler {document.name}-ROLE",
            )
        elif target.get("kind") == "LeaderWorkerSet" and str(target.get("name")).startswith(f"{document.name}-"):
            yield scaler.finding(
                "scaling",
                "spec.scaleTargetRef",
                what="it scales a LeaderWorkerSet that belongs to a DisaggregatedSet",
                why="its owner sets it back, and the next rollout gives it another name",
                mend="scaling.mode: External, and target the DisaggregatedSetRoleScaler",
            )
        elif target.get("kind") == "DisaggregatedSetRoleScaler" and str(target.get("name")).startswith(
            f"{document.name}-"
        ):
            role = str(target["name"]).removeprefix(f"{document.name}-")
            if role not in external:
                yield scaler.finding(
                    "scaling",
                    "spec.scaleTargetRef.name",
                    what=f"the role {role} is not scaled from outside",
                    why="there is no such scaler",
                    mend=f"set scaling.mode: External on the role {role}",
                )


def _is_external(role: Manifest) -> bool:
    return bool(at(role, ["scaling", "mode"]) == "External")


def _strategy(document: Document, path: str, spec: Any, *, in_set: bool) -> Iterator[Finding]:
    strategy = at(spec, ["rolloutStrategy"]) or {}
    rolling = strategy.get("rollingUpdateConfiguration")
    if strategy.get("type", "RollingUpdate") != "RollingUpdate":
        yield document.finding(
            "rollout",
            f"{path}.type",
            what=f"the strategy is {strategy.get('type')}",
            why="the webhook refuses it",
            mend="write RollingUpdate",
        )
    if in_set and not rolling:
        yield document.finding(
            "rollout-stalls",
            path,
            what="rollingUpdateConfiguration is not given",
            why=f"default maxSurge 1: {_STALL}",
            mend=_STALL_MEND,
        )
        return
    rolling = rolling or {}
    surge, gone = rolling.get("maxSurge", 0), rolling.get("maxUnavailable", 1)
    if _zero(surge) and _zero(gone):
        yield document.finding(
            "rollout",
            f"{path}.rollingUpdateConfiguration",
            what="maxSurge and maxUnavailable are both 0",
            why="the webhook refuses it: nothing could ever be replaced",
            mend=_STALL_MEND,
        )
    for key, value in (("maxSurge", surge), ("maxUnavailable", gone)):
        if isinstance(value, str) and value.endswith("%") and value[:-1].isdigit() and int(value[:-1]) > 100:
            yield document.finding(
                "rollout",
                f"{path}.rollingUpdateConfiguration.{key}",
                what=f"{key} is {value}",
                why="the webhook refuses it",
                mend="100% at most",
            )
    if in_set and rolling.get("partition"):
        yield document.finding(
            "rollout",
            f"{path}.rollingUpdateConfiguration.partition",
            what=f"partition is {rolling['partition']}",
            why="the webhook refuses it in a DisaggregatedSet",
            mend="take it away",
        )


def _zero(value: object) -> bool:
    return value in (0, "0", "0%")


def _group(document: Document, path: str, spec: Any) -> Iterator[Finding]:
    template = at(spec, ["leaderWorkerTemplate"]) or {}
    if (template.get("size") or 1) == 1 and template.get("leaderTemplate"):
        yield document.finding(
            "group",
            f"{path}.leaderWorkerTemplate",
            what="a group of one has a leaderTemplate and a workerTemplate",
            why="the worker's template is used by nobody",
            mend="keep the workerTemplate only",
        )


def _siblings(case: Case) -> Iterator[Finding]:
    """Deployments of GPU workers whose rollout wants a GPU that is not there."""
    for pod in case.pods:
        if (
            pod.document.kind != "Deployment"
            or pod.side is None
            or not any(gpus(c) or at(c, ["resources", "claims"]) for _, c in pod.containers)
        ):
            continue
        strategy = pod.document.spec.get("strategy") or {}
        if strategy.get("type") != "Recreate" and not strategy.get("rollingUpdate"):
            yield pod.finding(
                "rollout-stalls",
                "spec.strategy",
                what="a GPU Deployment has no explicit strategy",
                why=f"default maxSurge 25 %, rounded up: {_STALL}",
                mend=_STALL_MEND,
            )
