"""`tollbridge up`: one command from nothing to an OpenAI-compatible URL, and back to nothing on Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import socket
import sys
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tollbridge.cli.display import make_display
from tollbridge.cli.interrupts import Interrupts, run_interruptible
from tollbridge.cli.keep import Keeper
from tollbridge.cli.launch import launched
from tollbridge.cli.options import ConfigFile, PrintConfig, configure
from tollbridge.cli.stack import Stack, check_startable
from tollbridge.config.cluster import ClusterConfig, RouterConfig
from tollbridge.config.secret import secret_for_local
from tollbridge.config.show import render
from tollbridge.errors import StartupError
from tollbridge.worker.supervisor import OnLine


def up(
    *,
    config: ConfigFile = None,
    model: Annotated[str | None, Parameter(help="smollm2, tiny (random weights), a folder, or a hub id.")] = None,
    port: Annotated[int | None, Parameter(help="The router's port; 0 chooses a free one.")] = None,
    logs: Annotated[bool, Parameter(negative=(), show_default=False, help="Show what router and workers log.")] = False,
    print_config: PrintConfig = False,
) -> int:
    """Run router and workers on this machine until Ctrl-C. Without a cluster file: one prefill and one decode worker.

    The default model is fetched if it is missing. A process that crashes is started again, with growing pauses; one
    that cannot start (exit code 3) is not.
    """
    loaded = configure(config, model=model, port=port)
    if print_config:
        print(render(loaded), end="")
        return 0
    cluster = loaded.cluster
    check_startable(cluster)
    check_port_free(cluster.router)
    secret = secret_for_local(cluster)
    return asyncio.run(run_interruptible(partial(_serve, cluster, secret, show_line if logs else None)))


async def _serve(cluster: ClusterConfig, secret: bytes, on_line: OnLine | None, interrupts: Interrupts) -> int:
    async with AsyncExitStack() as running:
        with make_display() as display:  # only while something is on its way: later it would repaint for nothing
            launch = launched(cluster, secret, display, interrupts, on_line=on_line)
            stack = await running.enter_async_context(launch)
        display.note(f"serving {stack.model}; Ctrl-C lets requests finish and stops everything, again stops it at once")
        print(invitation(stack), flush=True)
        raise await Keeper(stack, say).run()


def invitation(stack: Stack) -> str:
    """Return the URL and a request to paste."""
    body = {
        "model": stack.model,
        "stream": True,
        "messages": [{"role": "user", "content": "Why do bridges have tolls?"}],
    }
    key = ' -H "authorization: Bearer $TOLLBRIDGE_API_KEY"' if stack.cluster.router.api_keys else ""
    return (
        f"Tollbridge is at {stack.url}/v1\n"
        f"  watch it: {stack.url}/ui\n"
        f"  curl -N {stack.url}/v1/chat/completions -H 'content-type: application/json'{key} -d '{json.dumps(body)}'\n"
        f"  {program()} chat --url {stack.url}"
    )


def program() -> str:
    """Return how to call this program: by the path it was called by, unless a shell finds it by its name."""
    called = Path(sys.argv[0])
    found = shutil.which("tollbridge")
    if called.name != "tollbridge" or (found and called.exists() and os.path.samefile(found, called)):
        return "tollbridge"
    return shlex.quote(sys.argv[0])


def check_port_free(router: RouterConfig) -> None:
    """Raise StartupError when the router's port is taken: better now than after the workers have loaded the model."""
    family = socket.AF_INET6 if ":" in router.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((router.host, router.port))
        except OSError as error:
            raise StartupError(
                f"the router cannot listen on {router.host} port {router.port} ({error.strerror or error}): "
                "choose another port with --port, or --port 0 for any free one."
            ) from None


def say(sentence: str) -> None:
    """Tell on stderr, which may be gone, what happened to a child."""
    with suppress(OSError):
        print(f"tollbridge: {sentence}", file=sys.stderr, flush=True)


def show_line(name: str, line: str) -> None:
    """Pass one line of a child on to stderr, which may be gone."""
    with suppress(OSError):
        print(f"{name:<6} | {line}", file=sys.stderr, flush=True)
