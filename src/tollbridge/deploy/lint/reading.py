"""Files into objects: YAML or JSON, several in a file, lists taken apart; a file that is none is a finding."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import yaml

from tollbridge.deploy.lint.findings import Document, Finding
from tollbridge.errors import ConfigError

SUFFIXES = (".yaml", ".yml", ".json")


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice or an anchor in itself, as kubectl does, and leaves dates texts."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._open: list[str | None] = []

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) and event.anchor in self._open:
            raise yaml.composer.ComposerError(
                None,
                None,
                f"the anchor {event.anchor!r} contains itself",
                event.start_mark,  # type: ignore[arg-type]
            )
        self._open.append(event.anchor)
        node = super().compose_node(parent, index)
        self._open.pop()
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is written twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _text(loader: _Loader, node: yaml.ScalarNode) -> str:
    return str(loader.construct_scalar(node))


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _text)


def files_of(paths: list[Path]) -> list[Path]:
    """Return the manifests among `paths`, folders searched; ConfigError for one that does not exist or holds none."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(each for each in path.rglob("*") if each.suffix in SUFFIXES and each.is_file())
            if not inside:
                raise ConfigError(f"{path} holds no manifests: none of its files ends with {', '.join(SUFFIXES)}.")
            found += inside
        elif path.exists() or str(path) == "-":
            found.append(path)
        else:
            raise ConfigError(f"{path} does not exist: name files or folders with manifests.")
    return found


def read(name: str, text: str) -> tuple[list[Document], list[Finding]]:
    """Return the objects in a file's text, and what kept others from being read."""
    try:
        loaded = list(yaml.load_all(text, Loader=_Loader))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        return [], [_unreadable(name, error)]
    documents: list[Document] = []
    findings: list[Finding] = []
    for value in _flat(loaded):
        if isinstance(value, dict) and isinstance(value.get("kind"), str) and isinstance(value.get("apiVersion"), str):
            documents.append(Document(file=name, manifest=value))
        elif value is not None:
            findings.append(_no_object(name, value))
    return documents, findings


def _flat(values: list[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, dict) and value.get("kind") == "List" and isinstance(value.get("items"), list):
            yield from value["items"]
        else:
            yield value


def _unreadable(name: str, error: Exception) -> Finding:
    where = ""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        where = f"line {error.problem_mark.line + 1}: "
    reason = getattr(error, "problem", None) or " ".join(str(error).split())
    return Finding(
        rule="yaml",
        file=name,
        object="-",
        path="",
        what=f"{where}{reason}",
        why="kubectl cannot read the file, or reads one of the two values",
        mend="write valid YAML, each key once",
    )


def _no_object(name: str, value: object) -> Finding:
    lacking = [
        key for key in ("apiVersion", "kind") if not isinstance(value, dict) or not isinstance(value.get(key), str)
    ]
    return Finding(
        rule="no-object",
        file=name,
        object="-",
        path="",
        what=f"a document has no {' and no '.join(lacking)}",
        why="Kubernetes cannot tell what it is",
        mend="write apiVersion and kind, or take the document away",
    )
