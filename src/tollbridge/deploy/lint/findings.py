"""What a rule has to say: where, what, why that matters, and the mend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

Manifest = dict[str, Any]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong. `rule` is a stable word for it; `object` is "Kind/name"; `path` is dotted."""

    rule: str
    file: str
    object: str
    path: str
    what: str
    why: str
    mend: str


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """One object of a file, with defaults filled in once it has passed its schema."""

    file: str
    manifest: Manifest

    @property
    def kind(self) -> str:
        return str(self.manifest.get("kind"))

    @property
    def name(self) -> str:
        return str(self.metadata.get("name", ""))

    @property
    def namespace(self) -> str:
        return str(self.metadata.get("namespace") or "default")

    @property
    def metadata(self) -> Manifest:
        found = self.manifest.get("metadata")
        return found if isinstance(found, dict) else {}

    @property
    def spec(self) -> Manifest:
        found = self.manifest.get("spec")
        return found if isinstance(found, dict) else {}

    def finding(self, rule: str, path: str, *, what: str, why: str, mend: str) -> Finding:
        shown = f"{self.kind}/{self.name}"
        return Finding(rule=rule, file=self.file, object=shown, path=path, what=what, why=why, mend=mend)


def at(value: object, path: Sequence[str | int]) -> Any:
    """Return what stands at `path`, None where nothing does."""
    for step in path:
        if isinstance(value, Mapping) and isinstance(step, str):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            return None
    return value


def items(value: object, key: str) -> list[Manifest]:
    """Return the mappings in the list `value[key]`, none where there is no such list."""
    found = at(value, [key])
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
