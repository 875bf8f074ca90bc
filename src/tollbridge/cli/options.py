"""What several commands share: the cluster file, and the flags that override it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tollbridge.config import schema
from tollbridge.config.cluster import ClusterConfig, WorkerConfig
from tollbridge.config.load import Loaded, Override, load
from tollbridge.errors import ConfigError

ConfigFile = Annotated[
    Path | None, Parameter(name="--config", help="The cluster file; by default ./tollbridge.yaml where it exists.")
]
PrintConfig = Annotated[
    bool,
    Parameter(
        negative=(), show_default=False, help="Print the configuration and where each value came from, then exit."
    ),
]


def configure(config: Path | None, *, model: str | None = None, port: int | None = None) -> Loaded:
    """Return the configuration with the flags that were given on top; ConfigError when it is wrong."""
    flags = [
        Override(path="model", value=model, flag="--model"),
        Override(path="router.port", value=port, flag="--port"),
    ]
    return load(config, overrides=[flag for flag in flags if flag.value is not None])


def find_worker(cluster: ClusterConfig, name: str) -> WorkerConfig:
    """Return the worker called `name`; ConfigError naming the nearest otherwise."""
    workers = {worker.name: worker for worker in cluster.workers}
    if name not in workers:
        raise ConfigError(f'the cluster file has no worker "{name}": {schema.closest(name, list(workers))}')
    return workers[name]
