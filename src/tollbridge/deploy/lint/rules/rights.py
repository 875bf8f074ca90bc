"""Roles and their bindings: no more than the router needs, and no less."""

from __future__ import annotations

from collections.abc import Iterator

from tollbridge.deploy.lint.case import Case
from tollbridge.deploy.lint.findings import Document, Finding, at, items


def rules(case: Case) -> Iterator[Finding]:
    for role in case.of("Role", "ClusterRole"):
        for index, rule in enumerate(items(role.manifest, "rules")):
            wide = [key for key in ("apiGroups", "resources", "verbs") if "*" in (rule.get(key) or [])]
            secrets = "secrets" in (rule.get("resources") or []) and {"get", "list", "watch"} & set(
                rule.get("verbs") or []
            )
            if wide or secrets:
                yield role.finding(
                    "rights",
                    f"rules[{index}]",
                    what="the rule grants everything" if wide else "the rule reads all Secrets",
                    why="who takes over the router takes over more than it needs",
                    mend="pods: get, list, watch, in a Role of the namespace",
                )
    for binding in case.of("RoleBinding", "ClusterRoleBinding"):
        yield from _binding(case, binding)


def _binding(case: Case, binding: Document) -> Iterator[Finding]:
    accounts = {(each.namespace, each.name) for each in case.of("ServiceAccount")}
    for index, subject in enumerate(items(binding.manifest, "subjects")):
        if subject.get("kind") != "ServiceAccount":
            continue
        if not subject.get("namespace"):
            yield binding.finding(
                "binding",
                f"subjects[{index}]",
                what="the subject has no namespace",
                why="the API server refuses it",
                mend=f"add namespace: {binding.namespace}",
            )
        elif accounts and (subject["namespace"], subject.get("name")) not in accounts:
            yield binding.finding(
                "binding",
                f"subjects[{index}]",
                what=f"there is no ServiceAccount {subject.get('name')} here",
                why="the router may not list pods: it finds no worker",
                mend=f"name one of {', '.join(sorted(name for _, name in accounts))}",
            )
    reference = at(binding.manifest, ["roleRef"]) or {}
    roles = [each.name for each in case.of(str(reference.get("kind")))]
    if (
        roles
        and reference.get("name") not in roles
        and binding.kind == "RoleBinding"
        and reference.get("kind") == "Role"
    ):
        yield binding.finding(
            "binding",
            "roleRef.name",
            what=f"there is no Role {reference.get('name')}",
            why="nothing is granted",
            mend=f"name one of {', '.join(roles)}",
        )
