"""Objects as YAML, on one stream or as a Kustomize base; and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

Manifest = dict[str, Any]


class _Dumper(yaml.SafeDumper):
    """Writes what occurs twice twice: anchors are no use to a reader."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def to_yaml(objects: Iterable[Manifest]) -> str:
    """Return the objects as YAML documents."""
    return "---\n".join(yaml.dump(each, Dumper=_Dumper, sort_keys=False, width=120) for each in objects)


def base(files: Mapping[str, Sequence[Manifest]]) -> dict[str, str]:
    """Return the files of a Kustomize base, by name."""
    kustomization: Manifest = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(files),
    }
    return {"kustomization.yaml": to_yaml([kustomization]), **{name: to_yaml(each) for name, each in files.items()}}
