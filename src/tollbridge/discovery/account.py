"""Who we are to the API server, and how we know that it is the one: the service account that is mounted into each pod.

Token and certificate are read again for every request: the kubelet replaces the token every hour.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from pathlib import Path

from tollbridge.config.address import Address
from tollbridge.config.cluster import DiscoveryConfig
from tollbridge.errors import ConfigError


class Account:
    """The mounted folder with `token`, `ca.crt` and `namespace`, and where the API server is."""

    def __init__(self, config: DiscoveryConfig, environ: Mapping[str, str] = os.environ) -> None:
        """Raise ConfigError when this is no pod and the cluster file does not say what a pod would know."""
        self._folder = Path(config.account)
        self.url = (config.api or _in_cluster(environ)).rstrip("/")
        self.namespace = config.namespace or self._read("namespace")
        if not self.namespace:
            raise ConfigError(
                f"{self._folder}/namespace cannot be read: set discovery.namespace to where the workers' pods are.",
                param="discovery.namespace",
            )

    def headers(self) -> dict[str, str]:
        token = self._read("token")
        return {"Authorization": f"Bearer {token}"} if token else {}

    def tls(self) -> ssl.SSLContext | bool:
        """Return what verifies the server: the cluster's own CA, or the system's where none is mounted.

        Raises OSError when the CA is not one.
        """
        path = self._folder / "ca.crt"
        if not self.url.startswith("https://") or not path.exists():
            return True
        return ssl.create_default_context(cafile=str(path))

    def _read(self, name: str) -> str:
        try:
            return (self._folder / name).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return ""


def _in_cluster(environ: Mapping[str, str]) -> str:
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not port.isdigit():
        raise ConfigError(
            "discovery.kind is kubernetes, but KUBERNETES_SERVICE_HOST is not set, so this is no pod: "
            "set discovery.api to the address of the API server.",
            param="discovery.api",
        )
    return f"https://{Address(host=host, port=int(port))}"
