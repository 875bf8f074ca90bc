"""Assemble the cluster configuration, once: flag > environment variable > cluster file > default.

An unknown key, a wrong type or a contradiction is a ConfigError whose one sentence names where the value came from, the
key, and the closest valid key. Nothing is ignored: a typo that silently means "default" costs an afternoon.
An environment variable is the path in capitals, `router.port` as TOLLBRIDGE_ROUTER_PORT; lists live in the file only.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from tollbridge.config import check, schema
from tollbridge.config.cluster import ClusterConfig
from tollbridge.errors import ConfigError

DEFAULT_PATH = Path("tollbridge.yaml")
DEFAULT_SOURCE = "default"
_PREFIX = "TOLLBRIDGE_"
# Kubernetes describes a Service named "tollbridge" or "tollbridge-router" in variables that look like ours.
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT\w*)$|_PORT_\d+_(TCP|UDP)\w*$")


@dataclass(frozen=True, kw_only=True)
class Override:
    """A value given by a command-line flag."""

    path: str  # dotted, e.g. "router.port"
    value: object
    flag: str  # e.g. "--port"


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The configuration and the source of each value that is not a default."""

    cluster: ClusterConfig
    sources: Mapping[str, str]  # dotted path of a leaf -> file, variable or flag

    def source(self, path: str) -> str:
        """Return where the value at `path` came from: the nearest of it and what encloses it."""
        return _source(self.sources, path) or DEFAULT_SOURCE


def load(
    path: Path | None = None, *, environ: Mapping[str, str] | None = None, overrides: Sequence[Override] = ()
) -> Loaded:
    """Return the configuration. With no `path`, ./tollbridge.yaml is read where it exists; ConfigError when wrong."""
    environ = os.environ if environ is None else environ
    if path is None and DEFAULT_PATH.exists():
        path = DEFAULT_PATH
    tree = read_file(path) if path else {}
    sources = dict.fromkeys(_leaves(tree), str(path))
    for override in (*_from_environment(environ), *overrides):
        _set(tree, override.path, override.value)
        sources[override.path] = override.flag
    cluster = _convert(tree, sources)
    problem = check.find_problem(cluster)
    if problem:
        raise ConfigError(_sentence(problem, sources))
    return Loaded(cluster=cluster, sources=sources)


def read_file(path: Path) -> dict[str, Any]:
    """Return the mapping in a cluster file, with known keys only; ConfigError when it cannot be read."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)  # noqa: S506 (a SafeLoader)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: name the cluster file with --config.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text: write the cluster file in YAML.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {_where(error)}.") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply: a cluster file has four levels.") from None
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of keys to values, such as `model: smollm2`.")
    tree = expand(tree)
    problem = schema.find_misshapen(tree)
    if problem:
        raise ConfigError(f"{path}: {problem.path} {problem.clause}{_stop(problem.clause)}")
    return tree


def expand(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the mapping with what may be written as a word written out: `discovery: dns`."""
    found = tree.get("discovery")
    return {**tree, "discovery": {"kind": found}} if isinstance(found, str) else tree


def variables() -> dict[str, str]:
    """Return the environment variables that set a value, each with its dotted path."""
    return {_PREFIX + path.upper().replace(".", "_"): path for path, _ in schema.scalars()}


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice, which YAML forbids and PyYAML lets pass, and what JSON lacks.

    A merged mapping (`<<: *other`) may be overridden. Deep construction refuses an alias inside of what it names.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.deep_construct = True

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]  # before super() merges
        mapping = super().construct_mapping(node, deep=deep)
        if len({self.construct_object(key, deep=True) for key in keys}) < len(keys):
            raise yaml.constructor.ConstructorError(None, None, "a key is written twice", node.start_mark)
        return mapping


def _refuse(loader: yaml.SafeLoader, node: yaml.Node) -> None:
    loader.construct_undefined(node)


for _tag in ("set", "omap", "pairs"):
    _StrictLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", _refuse)


def _where(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem is None or error.problem_mark is None:
        return " ".join(str(error).split()).rstrip(".")
    return f"{error.problem} (line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1})"


def _leaves(value: object, path: str = "") -> Iterator[str]:
    """Yield the dotted path of every value that is not itself a section."""
    if isinstance(value, dict) and (not path or value):
        for key, inner in value.items():
            yield from _leaves(inner, schema.join(path, key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        yield path


def _from_environment(environ: Mapping[str, str]) -> Iterator[Override]:
    known = variables()
    sections = tuple(sorted({_PREFIX + path.split(".")[0].upper() + "_" for path in known.values() if "." in path}))
    for name, text in environ.items():
        if not text or _SERVICE_LINK.search(name):
            continue
        if name in known:
            yield Override(path=known[name], value=_parse(name, text, known[name]), flag=name)
        elif name.startswith(sections):
            raise ConfigError(f"the environment variable {name} sets no key: {schema.closest(name, list(known))}")


def _parse(name: str, text: str, path: str) -> object:
    kind = schema.kind_at(path)
    try:
        return None if text == "null" else msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError:
        hint = " (set enableServiceLinks: false in the pod)" if text.startswith("tcp://") else ""
        raise ConfigError(f"{name} is {json.dumps(text)}, but must be {schema.describe(kind)}{hint}.") from None


def _set(tree: dict[str, Any], path: str, value: object) -> None:
    *sections, key = path.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[key] = value


def _convert(tree: dict[str, Any], sources: Mapping[str, str]) -> ClusterConfig:
    try:
        return msgspec.convert(tree, ClusterConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(_sentence(_explain(str(error), tree), sources)) from None


def _explain(message: str, tree: dict[str, Any]) -> schema.Problem:
    """Turn msgspec's "Expected `int`, got `str` - at `$.router.port`" into our words."""
    what, _, where = message.partition(" - at `$.")
    path = where.rstrip("`").replace("[...]", "")  # msgspec's name for "some value of a mapping"
    missing = re.match(r"Object missing required field `(\w+)`", what)
    if missing:
        return schema.Problem(path=path, clause=f"lacks the key {missing[1]}")
    written = json.dumps(_get(tree, path), default=str, allow_nan=True)
    return schema.Problem(path=path, clause=f"is {written}, but must be {schema.describe(schema.kind_at(path))}")


def _get(tree: Any, path: str) -> object:
    for step in path.replace("[", ".[").split("."):
        tree = tree[int(step[1:-1])] if step.startswith("[") else tree[step]
    return tree


def _source(sources: Mapping[str, str], path: str) -> str | None:
    """Return the source of `path`, of what encloses it, or of the first value inside it."""
    outer = path
    while outer:
        if outer in sources:
            return sources[outer]
        outer = outer[: max(outer.rfind("."), outer.rfind("["), 0)]
    return next((source for leaf, source in sources.items() if leaf.startswith((f"{path}.", f"{path}["))), None)


def _sentence(problem: schema.Problem, sources: Mapping[str, str]) -> str:
    source = _source(sources, problem.path)
    return f"{source + ': ' if source else ''}{problem.path} {problem.clause}{_stop(problem.clause)}"


def _stop(clause: str) -> str:
    return "" if clause.endswith(("?", ".")) else "."
