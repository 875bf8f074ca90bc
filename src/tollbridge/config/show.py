"""Write a cluster configuration: for a person, with the source of each value, or for a child process to read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tollbridge.config.cluster import ClusterConfig
from tollbridge.config.load import Loaded
from tollbridge.config.schema import join

_COMMENT_COLUMN = 44
_HIDDEN = {"router.api_keys", "router.tenants.keys"}


def render(loaded: Loaded) -> str:
    """Return the configuration as YAML that can be read back, each value commented with where it came from."""
    return "".join(f"{line}\n" for line in _mapping(msgspec.to_builtins(loaded.cluster), "", 0, loaded))


def dump(cluster: ClusterConfig, path: Path) -> None:
    """Write the cluster file for child processes, readable by this user only."""
    content = msgspec.yaml.encode(cluster)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _mapping(section: dict[str, object], path: str, indent: int, loaded: Loaded) -> Iterator[str]:
    for key, value in section.items():
        where = join(path, key)
        start = f"{' ' * indent}{key}:"
        if isinstance(value, dict) and value:
            yield start
            yield from _mapping(value, where, indent + 2, loaded)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield start
            for index, item in enumerate(value):
                yield from _item(item, f"{where}[{index}]", indent + 2, loaded)
        else:
            shown = "null  # (hidden)" if _hidden(where) and value else json.dumps(value)
            yield f"{start} {shown}".ljust(_COMMENT_COLUMN) + f"  # {loaded.source(where)}"


def _hidden(where: str) -> bool:
    return re.sub(r"\[\d+\]", "", where) in _HIDDEN


def _item(item: dict[str, object], path: str, indent: int, loaded: Loaded) -> Iterator[str]:
    first, *rest = _mapping(item, path, indent + 2, loaded)
    yield f"{' ' * indent}- {first.lstrip()}"
    yield from rest
