"""The router: its file, its rights, and the pods that it is told to look for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import yaml

from tollbridge.config import schema
from tollbridge.config.check import find_problem
from tollbridge.config.cluster import ClusterConfig
from tollbridge.deploy.lint.case import Case
from tollbridge.deploy.lint.findings import Document, Finding, at, items
from tollbridge.deploy.lint.pods import PodView
from tollbridge.deploy.lint.rules.network import is_router

_POD_VERBS = {"get", "list", "watch"}


def rules(case: Case) -> Iterator[Finding]:
    for document in case.of("ConfigMap", "Secret"):
        for key, text in _files(document).items():
            yield from _cluster_file(document, key, text)
    for pod in case.pods:
        if is_router(pod):
            yield from _router(case, pod)


def _files(document: Document) -> dict[str, str]:
    data: dict[str, str] = {}
    for key in ("data", "stringData") if document.kind == "ConfigMap" else ("stringData",):
        found = document.manifest.get(key)
        data |= found if isinstance(found, dict) else {}
    return {
        key: str(text) for key, text in data.items() if Path(key).name.startswith("tollbridge") and key.endswith("yaml")
    }


def _cluster_file(document: Document, key: str, text: str) -> Iterator[Finding]:
    try:
        reason = _problem(yaml.safe_load(text) or {})
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
    if reason:
        yield document.finding(
            "cluster-file",
            f"data.{key}",
            what=reason,
            why="the router does not start",
            mend="see docs/cluster-file.md",
        )


def _problem(tree: object) -> str | None:
    if isinstance(tree, dict) and isinstance(tree.get("discovery"), str):
        tree = {**tree, "discovery": {"kind": tree["discovery"]}}
    found = schema.find_misshapen(tree)
    try:
        found = found or find_problem(msgspec.convert(tree, ClusterConfig))
    except msgspec.ValidationError as error:
        return str(error)
    return f"{found.path} {found.clause}" if found is not None else None


def _router(case: Case, pod: PodView) -> Iterator[Finding]:
    account = str(pod.spec.get("serviceAccountName", "default"))
    watches = any(
        "kind: kubernetes" in text or "discovery: kubernetes" in text
        for each in case.of("ConfigMap", "Secret")
        for text in _files(each).values()
    )
    if not watches:
        return
    if pod.spec.get("automountServiceAccountToken") is False:
        yield pod.finding(
            "router-token",
            f"{pod.spec_path}.automountServiceAccountToken",
            what="the router gets no token",
            why="it cannot list pods, and finds no worker",
            mend="automountServiceAccountToken: true",
        )
    if any(case.of("RoleBinding")) and not _may_watch(case, pod.document.namespace, account):
        yield pod.finding(
            "router-rights",
            f"{pod.spec_path}.serviceAccountName",
            what=f"the account {account} may not watch pods",
            why="the router finds no worker",
            mend="bind it to a Role with pods: get, list, watch",
        )


def _may_watch(case: Case, namespace: str, account: str) -> bool:
    for binding in case.of("RoleBinding", "ClusterRoleBinding"):
        subjects = items(binding.manifest, "subjects")
        if not any(each.get("name") == account and each.get("namespace") == namespace for each in subjects):
            continue
        name = at(binding.manifest, ["roleRef", "name"])
        for role in case.of("Role", "ClusterRole"):
            if role.name == name and any(_grants(rule) for rule in items(role.manifest, "rules")):
                return True
    return False


def _grants(rule: dict[str, object]) -> bool:
    resources, verbs = rule.get("resources") or [], rule.get("verbs") or []
    assert isinstance(resources, list) and isinstance(verbs, list)
    return bool({"pods", "*"} & set(resources)) and (set(verbs) >= _POD_VERBS or "*" in verbs)
