"""Make src/tollbridge/deploy/data from published schemas: `python make_schemas.py DEFINITIONS.json CRD_FOLDER`.

DEFINITIONS.json is `v1.37.0-local/_definitions.json` of the package kubernetes-validate 1.37.0 (OpenAPI definitions of
Kubernetes 1.37, Apache-2.0). CRD_FOLDER holds the CRDs of LWS release-0.10, the Gateway API Inference Extension and the
Prometheus operator (Apache-2.0 each), and a schema of Dynamo's DynamoGraphDeployment derived from its Go types.
Descriptions, patch hints and status are left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "src" / "tollbridge" / "deploy" / "data"
GROUPS = {
    "": "Pod Service Namespace Secret ConfigMap ServiceAccount PersistentVolume PersistentVolumeClaim Endpoints "
    "LimitRange ResourceQuota ReplicationController",
    "apps": "Deployment StatefulSet DaemonSet ReplicaSet",
    "batch": "Job CronJob",
    "rbac.authorization.k8s.io": "Role RoleBinding ClusterRole ClusterRoleBinding",
    "policy": "PodDisruptionBudget",
    "networking.k8s.io": "NetworkPolicy Ingress IngressClass",
    "autoscaling": "HorizontalPodAutoscaler",
    "resource.k8s.io": "ResourceClaimTemplate ResourceClaim DeviceClass ResourceSlice",
    "coordination.k8s.io": "Lease",
    "discovery.k8s.io": "EndpointSlice",
    "storage.k8s.io": "StorageClass",
    "scheduling.k8s.io": "PriorityClass",
}
VERSIONS = {"autoscaling": "v2"}
CLUSTER_SCOPED = {
    "Namespace",
    "PersistentVolume",
    "ClusterRole",
    "ClusterRoleBinding",
    "DeviceClass",
    "ResourceSlice",
    "StorageClass",
    "PriorityClass",
    "IngressClass",
}
DROPPED = {
    "description",
    "x-kubernetes-patch-strategy",
    "x-kubernetes-patch-merge-key",
    "x-kubernetes-group-version-kind",
    "x-kubernetes-unions",
    "$schema",
    "title",
}
SPECIAL = {
    "io.k8s.apimachinery.pkg.api.resource.Quantity": {"x-quantity": True},
    "io.k8s.apimachinery.pkg.util.intstr.IntOrString": {"x-kubernetes-int-or-string": True},
}


def slim(value: Any) -> Any:
    """Return a schema without what validation does not need."""
    if isinstance(value, list):
        return [slim(each) for each in value]
    if not isinstance(value, dict):
        return value
    # a property may have any name, also one of those that are dropped
    properties = value.get("properties")
    result = {k: slim(v) for k, v in value.items() if k not in DROPPED and k != "properties"}
    if isinstance(properties, dict):
        result["properties"] = {name: slim(each) for name, each in properties.items()}
    if isinstance(result.get("type"), list):
        named = [each for each in result["type"] if each != "null"]
        result["type"] = named[0] if len(named) == 1 else named
    if isinstance(result.get("$ref"), str):
        result["$ref"] = result["$ref"].rpartition("/")[2]
    return result


def refs(value: Any) -> set[str]:
    if isinstance(value, dict):
        found = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return found.union(*(refs(each) for each in value.values()))
    return set().union(*(refs(each) for each in value)) if isinstance(value, list) else set()


def core(definitions: dict[str, Any]) -> dict[str, Any]:
    kinds, wanted = [], set()
    for name, definition in definitions.items():
        for gvk in definition.get("x-kubernetes-group-version-kind", ()):
            if gvk["kind"] in GROUPS.get(gvk["group"], "").split() and gvk["version"] == VERSIONS.get(
                gvk["group"], "v1"
            ):
                api = f"{gvk['group']}/{gvk['version']}".lstrip("/")
                kinds.append(
                    {
                        "apiVersion": api,
                        "kind": gvk["kind"],
                        "schema": {"$ref": name},
                        "namespaced": gvk["kind"] not in CLUSTER_SCOPED,
                    }
                )
                wanted.add(name)
    defs: dict[str, Any] = {}
    wanted |= {"io.k8s.api.core.v1.PodTemplateSpec", "io.k8s.api.core.v1.EnvVar"}
    while todo := wanted - defs.keys():
        for name in todo:
            defs[name] = SPECIAL.get(name) or slim(definitions[name])
            wanted |= refs(defs[name])
    return {
        "kinds": sorted(kinds, key=lambda each: (each["apiVersion"], each["kind"])),
        "defs": dict(sorted(defs.items())),
    }


def custom(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the kinds of a CRD, or of a plain schema of one object."""
    if document.get("kind") == "CustomResourceDefinition":
        spec = document["spec"]
        return [
            {
                "apiVersion": f"{spec['group']}/{version['name']}",
                "kind": spec["names"]["kind"],
                "namespaced": spec["scope"] == "Namespaced",
                "schema": finish(version["schema"]["openAPIV3Schema"]),
            }
            for version in spec["versions"]
        ]
    api, kind = document["properties"]["apiVersion"], document["properties"]["kind"]
    return [
        {
            "apiVersion": api.get("const", "monitoring.coreos.com/v1"),
            "kind": kind.get("const"),
            "namespaced": True,
            "schema": finish(document),
        }
    ]


def finish(schema: dict[str, Any]) -> dict[str, Any]:
    result = slim(schema)
    result["properties"]["metadata"] = {"$ref": "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}
    result["properties"].pop("status", None)
    result["properties"]["status"] = {"x-kubernetes-preserve-unknown-fields": True}
    for key in ("apiVersion", "kind"):
        result["properties"][key] = {"type": "string"}
    return result


def write(name: str, content: Any) -> None:
    (DATA / name).write_text(json.dumps(content, separators=(",", ":"), sort_keys=True) + "\n")


def main() -> None:
    definitions = json.loads(Path(sys.argv[1]).read_text())["$defs"]
    write("core.json", core(definitions))
    for path in sorted(Path(sys.argv[2]).glob("*.json")):
        kinds = custom(json.loads(path.read_text()))
        for kind in kinds:
            kind["kind"] = kind["kind"] or ("PodMonitor" if "podmonitor" in path.name else "ServiceMonitor")
            write(f"{kind['kind'].lower()}.json", {"kinds": [kind], "defs": {}})


if __name__ == "__main__":
    main()
