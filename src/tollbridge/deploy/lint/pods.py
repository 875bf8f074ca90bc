"""The pods that objects make, whatever their kind: spec, labels as they will be, role, and where it is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from tollbridge.deploy.lint.findings import Document, Finding, Manifest, at, items

SIDES = ("prefill", "decode")
_TEMPLATED = {"Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job", "ReplicationController"}
_ROLE_LABELS = (
    "tollbridge.io/role",
    "llm-d.ai/role",
    "disaggregatedset.x-k8s.io/role",
    "nvidia.com/dynamo-component-type",
    "nvidia.com/dynamo-sub-component-type",
    "app.kubernetes.io/component",
    "role",
    "component",
    "app",
)


class PodView(msgspec.Struct, frozen=True, kw_only=True):
    """A pod template. `path` leads to the template (or pod) in its document, `labels` are those of a running pod."""

    document: Document
    path: str
    spec: Manifest
    labels: dict[str, str]
    replicas: int
    own_labels: dict[str, str]  # as written, before its owner sets others
    role: str | None = None  # as its owner names it

    @property
    def spec_path(self) -> str:
        return f"{self.path}.spec" if self.path else "spec"

    @property
    def side(self) -> str | None:
        """Whether it prefills or decodes, as far as names tell."""
        words = [self.role, *(self.labels.get(label) for label in _ROLE_LABELS), self.document.name]
        for word in words:
            found = [side for side in SIDES if word and side in word.lower()]
            if len(found) == 1:
                return found[0]
        return None

    @property
    def containers(self) -> list[tuple[str, Manifest]]:
        """Return the path and the mapping of each container that runs."""
        listed = enumerate(items(self.spec, "containers"))
        return [(f"{self.spec_path}.containers[{index}]", each) for index, each in listed]

    @property
    def all_containers(self) -> list[tuple[str, Manifest]]:
        listed = enumerate(items(self.spec, "initContainers"))
        return [*((f"{self.spec_path}.initContainers[{index}]", each) for index, each in listed), *self.containers]

    def finding(self, rule: str, path: str, *, what: str, why: str, mend: str) -> Finding:
        return self.document.finding(rule, path, what=what, why=why, mend=mend)

    @property
    def title(self) -> str:
        return f"{self.document.kind}/{self.document.name}" + (f" role {self.role}" if self.role else "")


def pods_of(document: Document) -> Iterator[PodView]:
    """Yield each pod that the object makes."""
    if document.kind == "Pod":
        yield _view(document, "", document.manifest, {}, 1, None)
    elif document.kind in _TEMPLATED:
        yield _view(document, "spec.template", at(document.spec, ["template"]), {}, _count(document.spec), None)
    elif document.kind == "CronJob":
        template = at(document.spec, ["jobTemplate", "spec", "template"])
        yield _view(document, "spec.jobTemplate.spec.template", template, {}, 1, None)
    elif document.kind == "LeaderWorkerSet":
        yield from _groups(document, "spec", document.spec, {}, document.name, None)
    elif document.kind == "DisaggregatedSet":
        for index, role in enumerate(items(document.spec, "roles")):
            name = str(role.get("name"))
            path, spec = f"spec.roles[{index}].spec", role.get("spec")
            yield from _groups(
                document, path, spec, _set_labels(document.name, name), f"{document.name}-0-{name}", name
            )
    elif document.kind == "DynamoGraphDeployment":
        yield from _components(document)


def _components(document: Document) -> Iterator[PodView]:
    for index, component in enumerate(items(document.spec, "components")):
        name, kind = str(component.get("name")), component.get("type")
        labels = {
            "nvidia.com/dynamo-graph-deployment-name": document.name,
            "nvidia.com/dynamo-component": name,
            **({"nvidia.com/dynamo-component-type": str(kind)} if kind else {}),
        }
        template = component.get("podTemplate")
        if isinstance(template, dict):
            path = f"spec.components[{index}].podTemplate"
            yield _view(document, path, template, labels, _count(component), str(kind) if kind else name)


def _set_labels(name: str, role: str) -> dict[str, str]:
    """Return what a DisaggregatedSet sets; it overwrites `app`."""
    prefix = "disaggregatedset.x-k8s.io"
    return {f"{prefix}/name": name, f"{prefix}/role": role, f"{prefix}/slice": "0", "app": f"{name}-0-{role}"}


def _groups(
    document: Document, path: str, spec: Any, labels: dict[str, str], name: str, role: str | None
) -> Iterator[PodView]:
    replicas = _count(spec if isinstance(spec, dict) else {})
    for index, key in (("0", "leaderTemplate"), ("1", "workerTemplate")):
        template = at(spec, ["leaderWorkerTemplate", key])
        alone = key == "workerTemplate" and at(spec, ["leaderWorkerTemplate", "leaderTemplate"]) is None
        own = {
            "leaderworkerset.sigs.k8s.io/name": name,
            "leaderworkerset.sigs.k8s.io/worker-index": "0" if alone else index,
        }
        if isinstance(template, dict):
            yield _view(document, f"{path}.leaderWorkerTemplate.{key}", template, labels | own, replicas, role)


def _view(
    document: Document, path: str, template: Any, forced: dict[str, str], replicas: int, role: str | None
) -> PodView:
    template = template if isinstance(template, dict) else {}
    found = at(template, ["metadata", "labels"])
    labels = found if isinstance(found, dict) else {}
    spec = template.get("spec")
    return PodView(
        document=document,
        path=path,
        spec=spec if isinstance(spec, dict) else {},
        labels={**labels, **forced},
        replicas=replicas,
        own_labels=labels,
        role=role,
    )


def _count(spec: Manifest) -> int:
    found = spec.get("replicas", 1)
    return found if isinstance(found, int) else 1
