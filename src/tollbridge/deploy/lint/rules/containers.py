"""Containers beside each other, their variables, and what restarts them."""

from __future__ import annotations

from collections.abc import Iterator

from tollbridge.deploy.lint.case import Case
from tollbridge.deploy.lint.findings import Document, Finding, Manifest, at, items
from tollbridge.deploy.lint.pods import PodView

_FIELDS = {
    "metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "spec.serviceAccountName", "status.hostIP",
    "status.hostIPs", "status.podIP", "status.podIPs",
}  # fmt: skip
_MAPS = ("metadata.labels", "metadata.annotations")
_KEPT = {"Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "LeaderWorkerSet", "DisaggregatedSet"}
_SOURCES = {"name"}


def rules(case: Case) -> Iterator[Finding]:
    for pod in case.pods:
        yield from _names(pod)
        yield from _same_ports(pod)
        yield from _restart(pod)
        yield from _volumes(pod)
        for path, container in pod.all_containers:
            yield from _variables(case, pod, path, container)


def _names(pod: PodView) -> Iterator[Finding]:
    seen: set[str] = set()
    for path, container in pod.all_containers:
        name = str(container.get("name"))
        if name in seen:
            yield pod.finding(
                "twice",
                f"{path}.name",
                what=f"two containers are called {name}",
                why="no pod can be made",
                mend="give each a name of its own",
            )
        if not container.get("image"):
            yield pod.finding(
                "no-image",
                path,
                what=f"the container {name} has no image",
                why="no pod can be made",
                mend="name an image, with a version",
            )
        seen.add(name)


def _same_ports(pod: PodView) -> Iterator[Finding]:
    """Containers of a pod share its address."""
    seen: dict[object, str] = {}
    for path, container in pod.containers:
        for index, port in enumerate(items(container, "ports")):
            number, name = port.get("containerPort"), str(container.get("name"))
            if seen.get(number, name) != name:
                yield pod.finding(
                    "same-port",
                    f"{path}.ports[{index}]",
                    what=f"{name} and {seen[number]} both listen on {number}",
                    why="containers of a pod share its address: the second cannot bind",
                    mend="give one of them another port",
                )
            seen.setdefault(number, name)


def _restart(pod: PodView) -> Iterator[Finding]:
    policy = pod.spec.get("restartPolicy")
    if pod.document.kind in _KEPT and policy not in (None, "Always"):
        yield pod.finding(
            "restart-policy",
            f"{pod.spec_path}.restartPolicy",
            what=f"restartPolicy is {policy}",
            why=f"pods of a {pod.document.kind} must restart: they are refused otherwise",
            mend="take it away",
        )


def _volumes(pod: PodView) -> Iterator[Finding]:
    for index, volume in enumerate(items(pod.spec, "volumes")):
        sources = [key for key in volume if key not in _SOURCES]
        if len(sources) != 1:
            yield pod.finding(
                "volume-source",
                f"{pod.spec_path}.volumes[{index}]",
                what=f"the volume {volume.get('name')} has {len(sources)} sources",
                why="without one it is an empty folder, with two it is refused",
                mend="give it exactly one: emptyDir, hostPath, persistentVolumeClaim, configMap, secret, ...",
            )


def _variables(case: Case, pod: PodView, path: str, container: Manifest) -> Iterator[Finding]:
    for index, entry in enumerate(items(container, "env")):
        where = f"{path}.env[{index}]"
        if entry.get("value") and entry.get("valueFrom"):
            yield pod.finding(
                "variable",
                where,
                what=f"{entry.get('name')} has a value and a valueFrom",
                why="no pod can be made",
                mend="keep one of them",
            )
        field = at(entry, ["valueFrom", "fieldRef", "fieldPath"])
        if (
            field is not None
            and field not in _FIELDS
            and not str(field).startswith(("metadata.labels", "metadata.ann"))
        ):
            yield pod.finding(
                "variable",
                f"{where}.valueFrom.fieldRef.fieldPath",
                what=f"a pod has no field {field}",
                why="no pod can be made",
                mend="write status.podIP, or another field that exists",
            )
        yield from _key(case, pod, where, entry)


def _key(case: Case, pod: PodView, where: str, entry: Manifest) -> Iterator[Finding]:
    """A Secret or ConfigMap that is at hand lacks the key."""
    for kind, source in (("Secret", "secretKeyRef"), ("ConfigMap", "configMapKeyRef")):
        reference = at(entry, ["valueFrom", source]) or {}
        found = [each for each in case.of(kind) if each.name == reference.get("name")]
        here = [each for each in found if each.namespace == pod.document.namespace]
        if here and not reference.get("optional") and reference.get("key") not in _keys(here[0]):
            yield pod.finding(
                "dangling",
                f"{where}.valueFrom.{source}.key",
                what=f"the {kind} {here[0].name} has no key {reference.get('key')}",
                why="the container is not started",
                mend=f"name one of {', '.join(sorted(_keys(here[0]))) or '(none)'}",
            )


def _keys(document: Document) -> set[str]:
    return {str(key) for name in ("data", "stringData", "binaryData") for key in document.manifest.get(name) or {}}
