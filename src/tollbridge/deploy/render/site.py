"""What is rendered, and the names, labels and ports that its objects agree on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tollbridge.config.cluster import ClusterConfig
from tollbridge.config.deploy import DeployConfig, RoleConfig

Manifest = dict[str, Any]
Role = Literal["prefill", "decode"]
Target = Literal["disaggregatedset", "dgd", "deployments"]

ROLES: tuple[Role, Role] = ("prefill", "decode")
ROLE_LABEL = "tollbridge.io/role"
REVISION_LABEL = "tollbridge.io/revision"  # both workers of a split have the same
HTTP_PORT = 8000
KV_PORT = 7801  # of rank 0; rank r has the r-th after it
NIXL_PORT = 5600
UCX_PORTS = (20000, 20999)
EVENTS_PORT = 5557  # the replay socket is the port after it
SECRET_KEY = "TOLLBRIDGE_SECRET"  # noqa: S105 (the name of a variable)
USER = 1000


@dataclass(frozen=True, kw_only=True)
class Site:
    """A cluster file and what it is rendered for."""

    cluster: ClusterConfig
    target: Target

    @property
    def deploy(self) -> DeployConfig:
        return self.cluster.deploy

    @property
    def name(self) -> str:
        return self.deploy.name

    @property
    def kv_port(self) -> int:
        return KV_PORT if self.deploy.connector == "tollbridge" else NIXL_PORT

    def role(self, role: Role) -> RoleConfig:
        return self.deploy.prefill if role == "prefill" else self.deploy.decode

    def labels(self, component: str) -> dict[str, str]:
        return {
            "app.kubernetes.io/name": "tollbridge",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/component": component,
        }

    def selector(self, component: str) -> dict[str, str]:
        """Return labels that pick the pods of a component in every revision."""
        instance = {"app.kubernetes.io/instance": self.name}
        if component in ROLES:
            return {**instance, ROLE_LABEL: component}
        return {**instance, "app.kubernetes.io/component": component}

    def metadata(self, name: str, component: str, **more: Any) -> Manifest:
        return {"name": name, "namespace": self.deploy.namespace, "labels": self.labels(component), **more}

    def named(self, suffix: str) -> str:
        return f"{self.name}-{suffix}"
