"""All that is judged together: objects, the pods they make, the engines in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tollbridge.deploy.lint.engines import Engine, engines_of
from tollbridge.deploy.lint.findings import Document, items
from tollbridge.deploy.lint.pods import SIDES, PodView, pods_of


@dataclass(frozen=True)
class Case:
    documents: list[Document]

    @cached_property
    def pods(self) -> list[PodView]:
        return [pod for document in self.documents for pod in pods_of(document)]

    @cached_property
    def engines(self) -> list[Engine]:
        return [engine for pod in self.pods for engine in engines_of(pod)]

    def of(self, *kinds: str) -> Iterator[Document]:
        return (each for each in self.documents if each.kind in kinds)

    def pods_in(self, namespace: str) -> list[PodView]:
        return [pod for pod in self.pods if pod.document.namespace == namespace]

    @cached_property
    def groups(self) -> list[list[Engine]]:
        """Engines of one deployment each: those of one object, or of objects whose names differ in the role only.

        What is then left alone in a namespace is taken to belong together.
        """
        named: dict[tuple[str, str, str], list[Engine]] = {}
        for engine in self.engines:
            named.setdefault(_deployment(engine.pod), []).append(engine)
        whole = [group for group in named.values() if len({each.pod.side for each in group} - {None}) > 1]
        rest: dict[str, list[Engine]] = {}
        for group in named.values():
            if group not in whole:
                rest.setdefault(group[0].pod.document.namespace, []).extend(group)
        return [*whole, *rest.values()]

    def group_of(self, engine: Engine) -> list[Engine]:
        return next(group for group in self.groups if engine in group)

    def sides(self) -> Iterator[tuple[list[Engine], list[Engine]]]:
        """Yield prefill and decode engines that belong together."""
        for group in self.groups:
            prefill = [each for each in group if each.pod.side == "prefill"]
            decode = [each for each in group if each.pod.side == "decode"]
            if prefill and decode:
                yield prefill, decode


def _deployment(pod: PodView) -> tuple[str, str, str]:
    document = pod.document
    if document.kind in ("DisaggregatedSet", "DynamoGraphDeployment"):
        return document.namespace, document.kind, document.name
    parts = [part for part in document.name.split("-") if part not in SIDES]
    return document.namespace, "", pod.labels.get("app.kubernetes.io/instance") or "-".join(parts)


def selects(selector: Any, labels: dict[str, str]) -> bool:
    """Whether a label selector (matchLabels, matchExpressions) picks `labels`; an empty one picks all."""
    if not isinstance(selector, dict):
        return False
    wanted = selector.get("matchLabels")
    if isinstance(wanted, dict) and any(labels.get(key) != str(value) for key, value in wanted.items()):
        return False
    return all(_holds(each, labels) for each in items(selector, "matchExpressions"))


def _holds(expression: dict[str, Any], labels: dict[str, str]) -> bool:
    value, values = labels.get(str(expression.get("key"))), [str(each) for each in expression.get("values") or []]
    operator = expression.get("operator")
    if operator == "In":
        return value in values
    if operator == "NotIn":
        return value not in values
    return (value is not None) == (operator == "Exists")


def unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))
