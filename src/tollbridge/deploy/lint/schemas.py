"""The vendored schemas: which kinds are known, and what their fields may hold. data/README.md names the sources."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import msgspec

Schema = dict[str, Any]
_DATA = resources.files("tollbridge.deploy") / "data"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of object in one version of its API."""

    api: str
    name: str
    namespaced: bool
    schema: Schema


@dataclass(frozen=True, kw_only=True)
class Schemas:
    kinds: dict[tuple[str, str], Kind]  # by apiVersion and kind
    defs: dict[str, Schema]

    def resolve(self, schema: Schema) -> Schema:
        """Return `schema`, or what its reference stands for, with the fields beside the reference."""
        name = schema.get("$ref")
        if name is None:
            return schema
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        return {**self.defs[name], **beside}

    def versions(self, kind: str) -> list[str]:
        return [api for api, name in self.kinds if name == kind]

    def closest(self, kind: str) -> str | None:
        found = difflib.get_close_matches(kind, [name for _, name in self.kinds], n=1)
        return found[0] if found else None


@cache
def load() -> Schemas:
    """Return all vendored schemas; read once."""
    kinds: dict[tuple[str, str], Kind] = {}
    defs: dict[str, Schema] = {}
    for entry in sorted(_DATA.iterdir(), key=lambda each: each.name):
        if not entry.name.endswith(".json"):
            continue
        content = msgspec.json.decode(entry.read_bytes())
        defs |= content["defs"]
        for each in content["kinds"]:
            kind = Kind(api=each["apiVersion"], name=each["kind"], namespaced=each["namespaced"], schema=each["schema"])
            kinds[kind.api, kind.name] = kind
    return Schemas(kinds=kinds, defs=defs)
