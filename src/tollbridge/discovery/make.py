"""From the cluster file to the discovery that it asks for."""

from __future__ import annotations

from pathlib import Path

from tollbridge.clock import Clock
from tollbridge.config.cluster import ClusterConfig
from tollbridge.discovery.base import Discovery
from tollbridge.discovery.kubernetes import KubernetesDiscovery
from tollbridge.discovery.static import FileDiscovery, StaticDiscovery


def make_discovery(cluster: ClusterConfig, clock: Clock) -> Discovery:
    """Return what tells who serves; ConfigError when it cannot work here."""
    config = cluster.discovery
    if config.kind == "kubernetes":
        return KubernetesDiscovery(config, clock)
    if config.kind == "dns":
        from tollbridge.discovery.dns import DnsDiscovery  # its resolver is slow to import

        return DnsDiscovery(cluster.workers, config, clock)
    if config.file is not None:
        return FileDiscovery(Path(config.file), clock)
    return StaticDiscovery(cluster.workers, clock)
