"""A router process over vLLM workers: `python -m benchmarks.gpu.router CLUSTER.json` prints its ready line."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.servers import SECRET, Server


@dataclass
class Router:
    """Where it listens, and its process."""

    url: str
    process: subprocess.Popen[str]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def start_router(
    workers: Mapping[str, Server], folder: Path, *, prefer: Mapping[str, str], connector: str = "tollbridge",
    slo: Mapping[str, float] | None = None,
) -> Router:  # fmt: skip
    """Start a router over `workers`: one that is told of an `slo` prices what it gets, as it does by default, and tries
    the links for that; else with policy local. Requests choose another policy by header."""
    cluster = {
        "router": {"port": 0, "policy": "adaptive" if slo else "local"},
        "slo": dict(slo or {}),
        "workers": [
            {
                "name": name,
                "prefer": prefer.get(name, "any"),
                "engine": "vllm",
                "connector": connector,
                "url": server.url,
                "kv": f"127.0.0.1:{server.kv_port}",
            }
            for name, server in workers.items()
        ],
    }
    name = f"router-{'-'.join(workers)}-{next(iter(workers.values())).port}-{secrets.token_hex(4)}.json"
    path = folder / name
    path.write_text(json.dumps(cluster))
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.router", str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TOLLBRIDGE_SECRET": SECRET, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=folder,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("the router did not start")
    return Router(json.loads(line)["url"], process)


def main(path: Path) -> int:
    """Serve until killed."""
    import msgspec

    from tollbridge.config.cluster import ClusterConfig
    from tollbridge.router.main import run_router

    return run_router(cluster=msgspec.json.decode(path.read_bytes(), type=ClusterConfig), secret=SECRET.encode())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
