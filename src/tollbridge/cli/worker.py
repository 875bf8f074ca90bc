"""`tollbridge worker`: one worker of the cluster file, in the foreground."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from tollbridge.cli.options import ConfigFile, PrintConfig, configure, find_worker
from tollbridge.config.secret import is_local, maybe_secret, require_secret
from tollbridge.config.show import render

app = App(name="worker", help_format="plaintext")
app.command(
    "tollbridge.cli.vllm:vllm",
    name="vllm",
    help="Run a vLLM server as a worker.\n\n"
    "`tollbridge worker vllm MODEL [FLAGS] -- [VLLM'S FLAGS]`, or --name for a worker of the cluster file. It finds "
    "the address for KV, sets what vLLM needs for verified splits, and prints one JSON line once it is healthy. "
    "Exit code 3 when it does not start.",
)


@app.default
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
