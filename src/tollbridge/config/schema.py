"""The shape of the cluster file, read off its structs: which keys exist, and what a key may hold, in words."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from tollbridge.config.cluster import ClusterConfig

_WORDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The first thing wrong at `path`, a dotted path as in `router.port`; `clause` completes a sentence."""

    path: str
    clause: str


def join(path: str, key: str) -> str:
    """Return the dotted path of `key` below `path`."""
    return f"{path}.{key}" if path else key


def fields_of(section: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the type of each key that `section` allows."""
    return {field.encode_name: field.type for field in msgspec.structs.fields(section)}


def scalars() -> Iterator[tuple[str, Any]]:
    """Yield path and type of each plain value outside lists: what an environment variable can set."""
    for name, kind in fields_of(ClusterConfig).items():
        if _is_section(kind):
            yield from ((join(name, key), inner) for key, inner in fields_of(kind).items() if _is_scalar(inner))
        elif _is_scalar(kind):
            yield name, kind


def kind_at(path: str) -> Any:
    """Return the type of the value at a dotted path such as `workers[0].cores[1]`; None where nothing is known."""
    kind: Any = ClusterConfig
    for step in path.replace("[", ".[").split("."):
        if step.startswith("["):
            kind = _item(kind)
        elif _is_section(kind):
            kind = fields_of(kind).get(step)
        else:
            return None
    return kind


def find_misshapen(value: object, kind: Any = ClusterConfig, path: str = "") -> Problem | None:
    """Return the first unknown key in `value`, or section that is no mapping, in the order they were written."""
    if _is_section(kind):
        if not isinstance(value, Mapping):
            return Problem(path=path, clause="must be a mapping of keys to values")
        return _find_in_section(value, kind, path)
    item = _item(kind)
    if _is_section(item) and isinstance(value, list):
        problems = (find_misshapen(each, item, f"{path}[{index}]") for index, each in enumerate(value))
        return next((problem for problem in problems if problem), None)
    return None


def closest(key: str, valid: list[str], *, cutoff: float = 0.6) -> str:
    """Return a question or a list that leads from a misspelt key to a valid one."""
    matches = difflib.get_close_matches(key, valid, n=1, cutoff=cutoff)
    return f"did you mean {matches[0]}?" if matches else f"valid are {', '.join(valid)}."


def describe(kind: Any) -> str:
    """Say in words what a value of `kind` is, e.g. `a whole number from 0 to 65535 or null`."""
    if get_origin(kind) is Annotated:
        inner, *metas = get_args(kind)
        return describe(inner) + "".join(_bounds(meta) for meta in metas if isinstance(meta, msgspec.Meta))
    if get_origin(kind) is Literal:
        return " or ".join(f'"{choice}"' for choice in get_args(kind))
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(describe(each) for each in get_args(kind))
    if get_origin(kind) is list:
        return "a list"
    return _WORDS.get(kind, "a mapping of keys to values")


def _bounds(meta: msgspec.Meta) -> str:
    if meta.ge is not None and meta.le is not None:
        return f" from {meta.ge} to {meta.le}"
    if meta.ge is not None:
        return f" of at least {meta.ge}"
    return f" above {meta.gt}" if meta.gt is not None else ""


def _find_in_section(value: Mapping[object, object], section: type[msgspec.Struct], path: str) -> Problem | None:
    valid = fields_of(section)
    for key, inner in value.items():
        if key not in valid:
            clause = f"is no key of the cluster file: {_advise(str(key), path)}"
            return Problem(path=join(path, str(key)), clause=clause)
        problem = find_misshapen(inner, valid[str(key)], join(path, str(key)))
        if problem:
            return problem
    return None


def _advise(key: str, path: str) -> str:
    """Lead to the same name in another section, else to a near name in this one."""
    elsewhere = next((other for other, _ in scalars() if other.rpartition(".")[2] == key), None)
    if elsewhere:
        return f"did you mean {elsewhere}?"
    here = fields_of(kind_at(path) if path else ClusterConfig)
    return closest(join(path, key), [join(path, name) for name in here])


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _item(kind: Any) -> Any:
    """Return the item type of a list type, also of one that may be null; None for anything else."""
    lists = [each for each in (kind, *get_args(kind)) if get_origin(each) is list]
    return get_args(lists[0])[0] if lists else None


def _is_scalar(kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return True
    if get_origin(kind) is Annotated:
        return _is_scalar(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        return all(_is_scalar(each) for each in get_args(kind))
    return kind in _WORDS
