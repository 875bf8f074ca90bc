"""Words that the API server knows, where the published schema says text only."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from tollbridge.deploy.lint.case import Case
from tollbridge.deploy.lint.findings import Document, Finding

_PORTS = {"TCP", "UDP", "SCTP"}
_EXPRESSION = {"In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"}
# key, or key of a list's items and key: the words that may stand there
WORDS: dict[str, set[str]] = {
    "imagePullPolicy": {"Always", "IfNotPresent", "Never"},
    "ports.protocol": _PORTS,
    "tolerations.effect": {"NoSchedule", "PreferNoSchedule", "NoExecute"},
    "tolerations.operator": {"Exists", "Equal", "Lt", "Gt"},
    "matchExpressions.operator": _EXPRESSION,
    "whenUnsatisfiable": {"DoNotSchedule", "ScheduleAnyway"},
    "accessModes": {"ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"},
    "policyTypes": {"Ingress", "Egress"},
    "dnsPolicy": {"ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"},
    "emptyDir.medium": {"", "Memory", "HugePages", "HugePages-2Mi", "HugePages-1Gi"},
    "hostPath.type": {
        "", "Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket", "CharDevice", "BlockDevice",
    },
    "exactly.allocationMode": {"ExactCount", "All"},
    "seccompProfile.type": {"RuntimeDefault", "Localhost", "Unconfined"},
    "fsGroupChangePolicy": {"OnRootMismatch", "Always"},
    "httpGet.scheme": {"HTTP", "HTTPS"},
    "strategy.type": {"RollingUpdate", "Recreate"},
    "updateStrategy.type": {"RollingUpdate", "OnDelete"},
    "podManagementPolicy": {"OrderedReady", "Parallel"},
    "sessionAffinity": {"None", "ClientIP"},
    "externalTrafficPolicy": {"Cluster", "Local"},
    "metrics.type": {"Resource", "Pods", "Object", "External", "ContainerResource"},
    "target.type": {"Utilization", "Value", "AverageValue"},
}  # fmt: skip
_SERVICE_TYPES = {"ClusterIP", "NodePort", "LoadBalancer", "ExternalName"}
_FREE = {"DisaggregatedSetRoleScaler", "ConfigMap", "Secret"}  # data of theirs is nobody's fields


def rules(case: Case) -> Iterator[Finding]:
    for document in case.documents:
        if document.kind not in _FREE:
            yield from _walk(document, document.manifest, "", "", "")
        if document.kind == "Service" and document.spec.get("type", "ClusterIP") not in _SERVICE_TYPES:
            yield _finding(document, "spec.type", str(document.spec["type"]), _SERVICE_TYPES)


def _walk(document: Document, value: object, path: str, above: str, key: str) -> Iterator[Finding]:
    """`key` is that of the value, `above` that of the mapping it stands in."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _walk(document, inner, f"{path}.{name}" if path else str(name), key, str(name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _walk(document, inner, f"{path}[{index}]", above, key)
    elif isinstance(value, str) and not path.startswith(("metadata", "status")):
        words = WORDS.get(f"{above}.{key}") or WORDS.get(key)
        if words is not None and value not in words:
            yield _finding(document, path, value, words)


def _finding(document: Document, path: str, value: str, words: set[str]) -> Finding:
    lower = {word.lower(): word for word in words}
    near = difflib.get_close_matches(value.lower(), list(lower), n=1, cutoff=0.5)
    choices = ", ".join(sorted(word for word in words if word))
    return document.finding(
        "word",
        path,
        what=f"{path} is {value!r}, but must be one of {choices}",
        why="the API server refuses it",
        mend=f"write {lower[near[0]] if near else choices}",
    )
