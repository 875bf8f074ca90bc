"""A manifest against the schema of its kind, as the API server does it: drop nulls, default, then check.

Unknown fields are refused. Map lists have unique keys. A rule in CEL is evaluated where an evaluator is at hand.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tollbridge.deploy.lint.cel import Evaluate
from tollbridge.deploy.lint.schemas import Schema, Schemas
from tollbridge.deploy.render.quantity import maybe_quantity

_WORDS = {"string": str, "boolean": bool, "object": dict, "array": list}
_SHOWN_CHARS = 80
_NOTHING = object()  # in the place of a value of another type: rules may rely on types


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What does not fit the schema at `path`."""

    rule: str
    path: str
    what: str
    mend: str


@dataclass(kw_only=True)
class _Walk:
    schemas: Schemas
    evaluate: Evaluate
    faults: list[Fault] = field(default_factory=list)

    def fault(self, rule: str, path: str, what: str, mend: str) -> None:
        self.faults.append(Fault(rule=rule, path=path, what=what, mend=mend))


def check(value: object, schema: Schema, schemas: Schemas, evaluate: Evaluate) -> tuple[Any, list[Fault]]:
    """Return `value` with defaults and without values of another type, and what is wrong with it."""
    walk = _Walk(schemas=schemas, evaluate=evaluate)
    checked = _value(walk, value, schema, "")
    return (None if checked is _NOTHING else checked), walk.faults


def _value(walk: _Walk, value: Any, schema: Schema, path: str) -> Any:
    schema = walk.schemas.resolve(schema)
    before = len(walk.faults)
    problem = _type_problem(value, schema)
    if problem:
        rule = "quantity" if _is_quantity(schema) else "type"
        what = f"{path or 'the object'} is {show(value)}, but must be {problem}"
        walk.fault(rule, path, what, _typed(value, problem))
        return _NOTHING
    _limits(walk, value, schema, path)
    if isinstance(value, dict):
        value = _mapping(walk, value, schema, path)
    elif isinstance(value, list) and "items" in schema:
        checked = [_value(walk, each, schema["items"], f"{path}[{index}]") for index, each in enumerate(value)]
        value = [None if each is _NOTHING else each for each in checked]  # indices stay those of the file
        _unique(walk, value, schema, path)
    if len(walk.faults) == before:
        _rules(walk, value, schema, path)
    return value


def _type_problem(value: object, schema: Schema) -> str | None:
    if _is_quantity(schema):
        return None if maybe_quantity(value) is not None else "a quantity such as 500m, 16Gi or 2"
    if schema.get("x-kubernetes-int-or-string"):
        return None if isinstance(value, (int, str)) and not isinstance(value, bool) else "a number or a text"
    wanted = schema.get("type")
    if wanted is None or (
        isinstance(wanted, list) and any(_type_problem(value, {"type": one}) is None for one in wanted)
    ):
        return None
    if isinstance(wanted, list):
        return " or ".join(wanted)
    if wanted in ("integer", "number"):
        right = (int,) if wanted == "integer" else (int, float)
        return None if isinstance(value, right) and not isinstance(value, bool) else f"a {wanted}"
    article = "an" if wanted[0] in "aeiou" else "a"
    return None if isinstance(value, _WORDS[wanted]) else f"{article} {wanted}"


def _is_quantity(schema: Schema) -> bool:
    """Whether it is one of Kubernetes' own, or a CRD's, which has the pattern of one."""
    return bool(schema.get("x-quantity")) or str(schema.get("pattern", "")).startswith(r"^(\+|-)?(([0-9]+")


def _typed(value: object, wanted: str) -> str:
    if wanted in ("a integer", "a number") and isinstance(value, str) and value.lstrip("-").isdigit():
        return f"take the quotes away: {value}"
    if wanted == "a string" and isinstance(value, (bool, int, float)):
        return f'put it in quotes: "{str(value).lower() if isinstance(value, bool) else value}"'
    if wanted.startswith("a quantity"):
        return "write a quantity: Gi and Mi are binary units, G and M decimal ones; there is no GB"
    return f"write {wanted}"


def _limits(walk: _Walk, value: Any, schema: Schema, path: str) -> None:
    for holds, clause in _bounds(value, schema):
        if not holds:
            walk.fault(
                "value", path, f"{path} is {show(value)}, but must {clause}", f"write a value that does: {clause}"
            )
    if "enum" in schema and value not in schema["enum"]:
        near = difflib.get_close_matches(str(value), [str(each) for each in schema["enum"]], n=1, cutoff=0.4)
        choices = ", ".join(str(each) for each in schema["enum"])
        walk.fault(
            "value",
            path,
            f"{path} is {show(value)}, but must be one of {choices}",
            f"write {near[0] if near else choices}",
        )
    if "const" in schema and value != schema["const"]:
        walk.fault("value", path, f"{path} is {show(value)}, but must be {schema['const']}", f"write {schema['const']}")


def _bounds(value: Any, schema: Schema) -> Iterator[tuple[bool, str]]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if "minimum" in schema:
            yield value >= schema["minimum"], f"be at least {schema['minimum']}"
        if "maximum" in schema:
            yield value <= schema["maximum"], f"be at most {schema['maximum']}"
    if isinstance(value, str):
        yield len(value) <= schema.get("maxLength", len(value)), f"have at most {schema.get('maxLength')} characters"
        yield len(value) >= schema.get("minLength", 0), f"have at least {schema.get('minLength')} characters"
        pattern = schema.get("pattern")
        yield pattern is None or _is_quantity(schema) or re.search(pattern, value) is not None, f"match {pattern}"
    if isinstance(value, list):
        yield len(value) <= schema.get("maxItems", len(value)), f"have at most {schema.get('maxItems')} items"
        yield len(value) >= schema.get("minItems", 0), f"have at least {schema.get('minItems')} items"
    if isinstance(value, dict):
        yield len(value) <= schema.get("maxProperties", len(value)), f"have at most {schema.get('maxProperties')} keys"
        yield len(value) >= schema.get("minProperties", 0), f"have at least {schema.get('minProperties')} keys"


def _mapping(walk: _Walk, value: dict[str, Any], schema: Schema, path: str) -> dict[str, Any]:
    known: dict[str, Schema] = schema.get("properties", {})
    value = {key: each for key, each in value.items() if each is not None}  # null is "not given"
    for key, inner in known.items():
        if key not in value and "default" in inner:
            value[key] = inner["default"]
    for key in schema.get("required", ()):
        if key not in value:
            walk.fault("missing", _join(path, key), f"{_join(path, key)} is missing", f"add {key}")
    checked = {key: _property(walk, key, each, schema, path) for key, each in value.items()}
    return {key: each for key, each in checked.items() if each is not _NOTHING}


def _property(walk: _Walk, key: Any, value: Any, schema: Schema, path: str) -> Any:
    known: dict[str, Schema] = schema.get("properties", {})
    where = _join(path, str(key))
    if key in known:
        return _value(walk, value, known[key], where)
    others = schema.get("additionalProperties")
    if isinstance(others, dict):
        return _value(walk, value, others, where)
    if others is not True and known and not schema.get("x-kubernetes-preserve-unknown-fields"):
        walk.fault("unknown-field", where, f"{where} is no field of this kind", _advise(walk, str(key), schema, path))
    return value


def _advise(walk: _Walk, key: str, schema: Schema, path: str) -> str:
    """Lead to a near name here, or to the place further in where a field of that name belongs."""
    known = schema["properties"]
    near = difflib.get_close_matches(key, list(known), n=1)
    inner = [name for name, each in known.items() if key in walk.schemas.resolve(each).get("properties", {})]
    if inner:
        return f"move it to {_join(path, inner[0])}.{key}"
    return f"did you mean {near[0]}?" if near else f"take it away; known here are {', '.join(sorted(known)[:12])}"


def _unique(walk: _Walk, value: list[Any], schema: Schema, path: str) -> None:
    keys = schema.get("x-kubernetes-list-map-keys")
    if not keys:
        return
    seen: dict[tuple[str, ...], int] = {}
    for index, each in enumerate(value):
        if not isinstance(each, dict):
            continue
        key = tuple(str(each.get(name, "TCP" if name == "protocol" else "")) for name in keys)
        if key in seen:
            what = f"{path}[{index}] has the same {' and '.join(keys)} ({', '.join(key)}) as {path}[{seen[key]}]"
            walk.fault("duplicate", f"{path}[{index}]", what, "give it another, or take one of them away")
        seen.setdefault(key, index)


def _rules(walk: _Walk, value: Any, schema: Schema, path: str) -> None:
    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" in rule["rule"]:
            continue  # of changes only
        if walk.evaluate(rule["rule"], value) is False:
            message = rule.get("message", f"the rule {rule['rule']} does not hold")
            walk.fault("rule", path, f"{path or 'the object'}: {message}", "make the rule hold")


def show(value: object) -> str:
    """Return a value as JSON, shortened."""
    text = json.dumps(value, default=str)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
