"""`tollbridge worker`: one worker of the cluster file, in the foreground."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from tollbridge.cli.options import ConfigFile, PrintConfig, configure
from tollbridge.config import schema
from tollbridge.config.cluster import ClusterConfig, WorkerConfig
from tollbridge.config.secret import is_local, maybe_secret, require_secret
from tollbridge.config.show import render
from tollbridge.errors import ConfigError


def worker(
    *,
    name: Annotated[str, Parameter(help="Which worker of the cluster file to run.")],
    config: ConfigFile = None,
    print_config: PrintConfig = False,
) -> int:
    """Run one worker in the foreground until SIGTERM or Ctrl-C. It prints one JSON line once it serves."""
    loaded = configure(config)
    if print_config:
        print(render(loaded), end="")
        return 0
    cluster = loaded.cluster
    chosen = find_worker(cluster, name)
    # On loopback a worker without the secret is fine: it serves locally and refuses splits.
    secret = maybe_secret(cluster.secret) if is_local(cluster) else require_secret(cluster.secret)
    from tollbridge.worker.main import run_worker

    return run_worker(cluster=cluster, worker=chosen, secret=secret)


def find_worker(cluster: ClusterConfig, name: str) -> WorkerConfig:
    """Return the worker called `name`; ConfigError naming the nearest otherwise."""
    workers = {worker.name: worker for worker in cluster.workers}
    if name not in workers:
        raise ConfigError(f'the cluster file has no worker "{name}": {schema.closest(name, list(workers))}')
    return workers[name]
