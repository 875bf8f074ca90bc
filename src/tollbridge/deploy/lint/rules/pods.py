"""A pod template by itself: volumes, ports, probes, resources, claims. Operators admit what fails here later."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tollbridge.deploy.lint.case import Case
from tollbridge.deploy.lint.findings import Finding, Manifest, at, items
from tollbridge.deploy.lint.pods import PodView
from tollbridge.deploy.render.quantity import maybe_quantity

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_PORT_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SELECTED = {"Deployment", "StatefulSet", "DaemonSet", "ReplicaSet"}


def rules(case: Case) -> Iterator[Finding]:
    for pod in case.pods:
        if not pod.containers:
            yield pod.finding(
                "no-container",
                f"{pod.spec_path}.containers",
                what="the pod has no container",
                why="it is refused when the pod is made, long after the object was admitted",
                mend="add a container",
            )
        yield from _mounts(pod)
        yield from _claims(pod)
        yield from _selector(pod)
        for path, container in pod.all_containers:
            yield from _twice(pod, path, container)
            yield from _ports(pod, path, container)
            yield from _probes(pod, path, container)
            yield from _resources(pod, path, container)


def _mounts(pod: PodView) -> Iterator[Finding]:
    names = [str(each.get("name")) for each in items(pod.spec, "volumes")]
    names += [str(at(each, ["metadata", "name"])) for each in _claim_templates(pod)]
    for path, container in pod.all_containers:
        for index, mount in enumerate(items(container, "volumeMounts")):
            if mount.get("name") not in names:
                yield pod.finding(
                    "mount",
                    f"{path}.volumeMounts[{index}]",
                    what=f"no volume is called {mount.get('name')!r}",
                    why="no pod can be made, and the object above shows no error",
                    mend=f"add the volume, or mount one of {', '.join(names) or 'those you add'}",
                )


def _claim_templates(pod: PodView) -> list[Manifest]:
    spec: Any = pod.document.spec
    for step in re.findall(r"\w+|\[\d+\]", pod.path.partition("spec.")[2].rpartition(".")[0]):
        spec = at(spec, [int(step[1:-1]) if step.startswith("[") else step])
    return items(spec, "volumeClaimTemplates") + items(pod.document.spec, "volumeClaimTemplates")


def _claims(pod: PodView) -> Iterator[Finding]:
    known = {str(each.get("name")) for each in items(pod.spec, "resourceClaims")}
    used: set[str] = set()
    for path, container in pod.all_containers:
        for index, claim in enumerate(items(container.get("resources"), "claims")):
            used.add(str(claim.get("name")))
            if claim.get("name") not in known:
                yield pod.finding(
                    "claim",
                    f"{path}.resources.claims[{index}]",
                    what=f"no resource claim is called {claim.get('name')!r}",
                    why="no pod can be made",
                    mend="add it to the pod's resourceClaims",
                )
    for name in sorted(known - used):
        yield pod.finding(
            "claim",
            f"{pod.spec_path}.resourceClaims",
            what=f"no container uses the resource claim {name}",
            why="the device is allocated, and no container sees it",
            mend="add it to resources.claims of the container",
        )


def _selector(pod: PodView) -> Iterator[Finding]:
    if pod.document.kind not in _SELECTED:
        return
    wanted = at(pod.document.spec, ["selector", "matchLabels"])
    for key, value in wanted.items() if isinstance(wanted, dict) else ():
        if pod.labels.get(key) != value:
            yield pod.finding(
                "selector",
                "spec.selector.matchLabels",
                what=f"the selector wants {key}={value}, and the template has not",
                why="the API server refuses the object",
                mend=f"add {key}: {value} to the template's labels",
            )


def _twice(pod: PodView, path: str, container: Manifest) -> Iterator[Finding]:
    for key, name in (("env", "name"), ("volumeMounts", "mountPath"), ("ports", "name")):
        seen: set[str] = set()
        for index, each in enumerate(items(container, key)):
            value = each.get(name)
            if value is not None and str(value) in seen:
                yield pod.finding(
                    "twice",
                    f"{path}.{key}[{index}]",
                    what=f"{value} is there twice in {key}",
                    why="the later one wins, or the pod is refused",
                    mend="take one of them away",
                )
            seen.add(str(value))


def _ports(pod: PodView, path: str, container: Manifest) -> Iterator[Finding]:
    for index, port in enumerate(items(container, "ports")):
        name, value = port.get("name"), port.get("containerPort")
        where = f"{path}.ports[{index}]"
        if isinstance(name, str) and (
            len(name) > 15 or _PORT_NAME.fullmatch(name) is None or "--" in name or name.isdigit()
        ):
            yield pod.finding(
                "port-name",
                f"{where}.name",
                what=f"the port's name {name!r} is not valid",
                why="no pod can be made",
                mend="15 characters at most: lower-case letters, digits, hyphens",
            )
        if isinstance(value, int) and not 1 <= value <= 65535:
            yield pod.finding(
                "port-number",
                f"{where}.containerPort",
                what=f"the port is {value}",
                why="no pod can be made",
                mend="write a number from 1 to 65535",
            )


def _probes(pod: PodView, path: str, container: Manifest) -> Iterator[Finding]:
    names = {each.get("name") for each in items(container, "ports")}
    for probe in (*PROBES, "lifecycle"):
        for action in ("httpGet", "tcpSocket"):
            steps = [probe, action] if probe != "lifecycle" else [probe, "preStop", action]
            port = at(container, [*steps, "port"])
            if isinstance(port, str) and not port.isdigit() and port not in names:
                known = ", ".join(sorted(str(name) for name in names if name)) or "none"
                yield pod.finding(
                    "probe-port",
                    f"{path}.{'.'.join(steps)}.port",
                    what=f"no port of the container is called {port!r}",
                    why="the probe always fails, and the pod never becomes ready",
                    mend=f"name a port of this container (named are: {known})",
                )
        handler = container.get(probe)
        if probe != "lifecycle" and isinstance(handler, dict) and handler:
            actions = [each for each in ("httpGet", "tcpSocket", "exec", "grpc") if each in handler]
            if len(actions) != 1:
                yield pod.finding(
                    "probe-action",
                    f"{path}.{probe}",
                    what=f"the probe has {len(actions)} actions",
                    why="no pod can be made",
                    mend="give it exactly one of httpGet, tcpSocket, exec, grpc",
                )


def _quantities(pod: PodView, path: str, given: Manifest) -> Iterator[Finding]:
    """CRDs embed pod templates without the pattern that quantities have."""
    for name, value in given.items():
        if maybe_quantity(value) is None:
            yield pod.finding(
                "quantity",
                f"{path}.{name}",
                what=f"{name} is {value!r}, which is no quantity",
                why="no pod can be made",
                mend="Gi and Mi are binary units, G and M decimal ones; there is no GB",
            )


def _resources(pod: PodView, path: str, container: Manifest) -> Iterator[Finding]:
    requests, limits = (at(container, ["resources", key]) or {} for key in ("requests", "limits"))
    for key, given in (("requests", requests), ("limits", limits)):
        yield from _quantities(pod, f"{path}.resources.{key}", given)
    for name in {*requests} & {*limits}:
        asked, most = maybe_quantity(requests[name]), maybe_quantity(limits[name])
        if asked is not None and most is not None and asked > most:
            yield pod.finding(
                "request-above-limit",
                f"{path}.resources.requests.{name}",
                what=f"{name} is requested {requests[name]} and limited to {limits[name]}",
                why="no pod can be made",
                mend="request at most the limit",
            )
    for name in {*requests, *limits}:
        if "/" in name and (name not in limits or requests.get(name, limits[name]) != limits[name]):
            yield pod.finding(
                "device-limit",
                f"{path}.resources.limits",
                what=f"{name} is requested, but its limit is not the same",
                why="devices cannot be overcommitted: the pod is refused",
                mend=f"write {name} under limits",
            )
