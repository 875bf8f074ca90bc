"""`tollbridge router`: the router alone, in the foreground."""

from __future__ import annotations

from tollbridge.cli.options import ConfigFile, PrintConfig, configure
from tollbridge.config.address import parse_address
from tollbridge.config.cluster import ClusterConfig
from tollbridge.config.secret import require_secret
from tollbridge.config.show import render
from tollbridge.errors import ConfigError
from tollbridge.obs import logs


def router(*, config: ConfigFile = None, print_config: PrintConfig = False) -> int:
    """Run the router in the foreground until SIGTERM or Ctrl-C. It prints one JSON line once it serves."""
    loaded = configure(config)
    if print_config:
        print(render(loaded), end="")
        return 0
    check_reachable(loaded.cluster)
    secret = require_secret(loaded.cluster.secret)
    from tollbridge.router.main import run_router
    from tollbridge.ui.mount import mount

    logs.configure()
    return run_router(cluster=loaded.cluster, secret=secret, extensions=[mount] if loaded.cluster.router.ui else [])


def check_reachable(cluster: ClusterConfig) -> None:
    """Raise ConfigError when a worker's address is still to be chosen: only its ready line knows it."""
    for index, worker in enumerate(cluster.workers if cluster.lists_workers else ()):
        if parse_address(worker.url, scheme="http://").port == 0:
            raise ConfigError(
                f'workers[{index}].url is "{worker.url}", which says "choose a port" to worker {worker.name}: '
                "write the port it chose, or let `tollbridge up` start both."
            )
