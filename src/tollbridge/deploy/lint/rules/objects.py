"""Names, labels, and references from one object to another."""

from __future__ import annotations

import base64
import binascii
import difflib
import re
from collections.abc import Iterator
from typing import Any

from tollbridge.deploy.lint.case import Case
from tollbridge.deploy.lint.findings import Document, Finding, at, items
from tollbridge.deploy.lint.pods import PodView

_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SERVICE = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_AS_LABEL = {"Namespace", "StatefulSet", "LeaderWorkerSet", "DisaggregatedSet", "DynamoGraphDeployment"}
_FREE = {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}  # any path segment


def rules(case: Case) -> Iterator[Finding]:
    yield from _doubles(case)
    for document in case.documents:
        yield from _name(document)
        yield from _labels(document, document.metadata, "metadata")
        yield from _secret_data(document)
    for pod in case.pods:
        yield from _references(case, pod)


def _doubles(case: Case) -> Iterator[Finding]:
    seen: dict[tuple[str, str, str], Document] = {}
    for each in case.documents:
        key = (each.kind, each.namespace, each.name)
        if each.name and key in seen:
            yield each.finding(
                "duplicate-object",
                "metadata.name",
                what=f"{each.kind}/{each.name} is written twice, also in {seen[key].file}",
                why="the one that is applied last replaces the other",
                mend="give one of them another name, or take it away",
            )
        seen.setdefault(key, each)


def _name(document: Document) -> Iterator[Finding]:
    if not document.name:
        if "generateName" not in document.metadata:
            yield document.finding(
                "name",
                "metadata.name",
                what="metadata.name is missing",
                why="the API server refuses the object",
                mend="add metadata.name",
            )
        return
    if document.kind in _FREE:
        return
    pattern = _SERVICE if document.kind == "Service" else _LABEL if document.kind in _AS_LABEL else _SUBDOMAIN
    longest = 253 if pattern is _SUBDOMAIN else 63
    if pattern.fullmatch(document.name) is None or len(document.name) > longest:
        yield document.finding(
            "name",
            "metadata.name",
            what=f"the name {document.name!r} is no name of a {document.kind}",
            why="it becomes a part of host names and labels, and the API server or a controller refuses it",
            mend=f"lower-case letters, digits and hyphens, {longest} characters at most"
            + (", a letter first" if pattern is _SERVICE else ""),
        )


def _labels(document: Document, metadata: Any, path: str) -> Iterator[Finding]:
    labels = at(metadata, ["labels"])
    for key, value in labels.items() if isinstance(labels, dict) else ():
        if _KEY.fullmatch(str(key)) is None or len(str(key).rpartition("/")[2]) > 63:
            problem = f"the label {key!r} is no valid key"
        elif isinstance(value, str) and (_VALUE.fullmatch(value) is None or len(value) > 63):
            problem = f"the label {key} has the value {value!r} ({len(value)} characters)"
        else:
            continue
        yield document.finding(
            "label",
            f"{path}.labels",
            what=problem,
            why="the API server refuses it",
            mend="63 characters at most: letters, digits, -, _ and ., alphanumeric at both ends",
        )


def _secret_data(document: Document) -> Iterator[Finding]:
    data = document.manifest.get("data") if document.kind == "Secret" else None
    for key, value in data.items() if isinstance(data, dict) else ():
        try:
            base64.b64decode(str(value), validate=True)
        except (binascii.Error, ValueError):
            yield document.finding(
                "secret-base64",
                f"data.{key}",
                what=f"data.{key} is not base64",
                why="the API server refuses it",
                mend="write the plain text under stringData",
            )


def _references(case: Case, pod: PodView) -> Iterator[Finding]:
    """A name that no object has, while one of that kind has a similar one, is a slip."""
    for kind, path, name in _named(pod):
        names = [each.name for each in case.of(kind) if each.namespace == pod.document.namespace]
        elsewhere = [each.namespace for each in case.of(kind) if each.name == name]
        if name in names:
            continue
        near = difflib.get_close_matches(name, names, n=1)
        if near or elsewhere:
            hint = f"did you mean {near[0]}?" if near else f"move it to the namespace {pod.document.namespace}"
            there = f" in the namespace {pod.document.namespace}" if elsewhere else ""
            yield pod.finding(
                "dangling",
                path,
                what=f"there is no {kind} {name}{there}",
                why="the pod stays pending for ever",
                mend=hint,
            )


def _named(pod: PodView) -> Iterator[tuple[str, str, str]]:
    for index, volume in enumerate(items(pod.spec, "volumes")):
        path = f"{pod.spec_path}.volumes[{index}]"
        for kind, steps in (
            ("PersistentVolumeClaim", ("persistentVolumeClaim", "claimName")),
            ("ConfigMap", ("configMap", "name")),
            ("Secret", ("secret", "secretName")),
        ):
            name = at(volume, steps)
            if name is not None and not at(volume, [steps[0], "optional"]):
                yield kind, f"{path}.{'.'.join(steps)}", str(name)
    for index, claim in enumerate(items(pod.spec, "resourceClaims")):
        path = f"{pod.spec_path}.resourceClaims[{index}]"
        if claim.get("resourceClaimTemplateName"):
            yield "ResourceClaimTemplate", f"{path}.resourceClaimTemplateName", str(claim["resourceClaimTemplateName"])
    if pod.spec.get("serviceAccountName"):
        yield "ServiceAccount", f"{pod.spec_path}.serviceAccountName", str(pod.spec["serviceAccountName"])
    for path, container in pod.all_containers:
        for index, entry in enumerate(items(container, "env")):
            for kind, key in (("Secret", "secretKeyRef"), ("ConfigMap", "configMapKeyRef")):
                reference = at(entry, ["valueFrom", key])
                if isinstance(reference, dict) and not reference.get("optional"):
                    yield kind, f"{path}.env[{index}].valueFrom.{key}.name", str(reference.get("name"))
