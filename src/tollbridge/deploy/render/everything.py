"""All objects of a deployment, in the order in which they should come to be, and what a person should know of them."""

from __future__ import annotations

from dataclasses import dataclass

from tollbridge.config.cluster import ClusterConfig
from tollbridge.deploy.memory import memory_of_roles
from tollbridge.deploy.render import around, monitors, network, router, storage
from tollbridge.deploy.render.check import check
from tollbridge.deploy.render.notes import notes
from tollbridge.deploy.render.pods import templates
from tollbridge.deploy.render.site import SECRET_KEY, Manifest, Site, Target
from tollbridge.deploy.render.workers import workers


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """`files` maps the name of a file to its objects; `notes` are sentences."""

    files: dict[str, list[Manifest]]
    notes: list[str]

    @property
    def objects(self) -> list[Manifest]:
        return [each for objects in self.files.values() for each in objects]


def render(cluster: ClusterConfig, target: Target, secret: str, *, force: bool = False) -> Rendered:
    """Return the objects; ConfigError where the cluster file cannot be deployed as it is."""
    site = Site(cluster=cluster, target=target)
    check(site)
    memory = memory_of_roles(site, force=force)
    config = router.engine_config(site)
    made = workers(site, templates(site, memory, config), memory)
    files = {
        "namespace.yaml": [around.namespace(site)],
        "secret.yaml": [_secret(site, secret)],
        "storage.yaml": storage.claims(site),
        "workers.yaml": [around.account(site), *config, *around.gpu_claims(site), *around.services(site), *made],
        "router.yaml": router.objects(site),
        "availability.yaml": [*around.budgets(site), *around.autoscalers(site)],
        "network.yaml": network.policies(site),
        "monitoring.yaml": monitors.monitors(site),
    }
    sentences = [memory[role].sentence() for role in memory]
    return Rendered(files={name: each for name, each in files.items() if each}, notes=[*sentences, *notes(site)])


def _secret(site: Site, secret: str) -> Manifest:
    metadata = site.metadata(site.named("transfer"), "workers")
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "Opaque",
        "stringData": {SECRET_KEY: secret},
    }
