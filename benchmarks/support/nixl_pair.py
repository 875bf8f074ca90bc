"""NIXL over UCX TCP between the hosts of a link, when a Python with the package `nixl` is at hand.

It may live in an environment of its own: TOLLBRIDGE_NIXL_PYTHON names that interpreter.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.support.kv_pair import Copy, KVPair, cores
from benchmarks.support.node import Node
from tollbridge.bench.netns import Link

MISSING = (
    "the NIXL figure is missing: no Python with `nixl` (python -m venv nixl; nixl/bin/pip install nixl==1.5.1; "
    "export TOLLBRIDGE_NIXL_PYTHON=nixl/bin/python)"
)
_NIXL_NODE = "benchmarks.support.nixl_node:NixlNode"
# the veth of the link only; without `tcp` first UCX would look for RDMA devices and shared memory
_ENVIRON = {"UCX_TLS": "tcp,self", "NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error"}


def version() -> str | None:
    """Return NIXL's version, None when there is no NIXL."""
    code = "import nixl._api, importlib.metadata as m; print(m.version('nixl'))"
    done = subprocess.run([_python(), "-c", code], capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.split()[-1] if done.returncode == 0 and done.stdout.split() else None


class NixlPair:
    """Prefill on host a, decode on host b, the same shape and tables as a KVPair."""

    def __init__(self, a: Node, b: Node, num_bytes: int) -> None:
        self.a, self.b, self._num_bytes = a, b, num_bytes

    def write(self) -> Copy:
        done = self.a.call("transfer", operation="WRITE")
        return Copy(num_bytes=self._num_bytes, seconds=done["seconds"], send_cpu_s=done["cpu_s"])

    def read(self) -> Copy:
        done = self.b.call("transfer", operation="READ")
        return Copy(num_bytes=self._num_bytes, seconds=done["seconds"], receive_cpu_s=done["cpu_s"])


@contextlib.contextmanager
def nixl_pair(joined: Link, pair: KVPair) -> Iterator[NixlPair | None]:
    """Start NIXL beside `pair` (idle meanwhile), on the same cores; None when there is no NIXL."""
    if version() is None:
        yield None
        return
    core_a, core_b = cores()
    python = _python()
    with (
        Node(_NIXL_NODE, core=core_a, prefix=joined.command("a", []), environ=_ENVIRON, python=python) as a,
        Node(_NIXL_NODE, core=core_b, prefix=joined.command("b", []), environ=_ENVIRON, python=python) as b,
    ):
        shape, (source, destination) = pair.shape.json(), pair.scattered
        known_a = a.call("open", name="a", shape=shape, table=source, fill=5)
        known_b = b.call("open", name="b", shape=shape, table=destination, fill=0)
        a.call("connect", metadata=known_b, pieces=b.call("pieces"))
        b.call("connect", metadata=known_a, pieces=a.call("pieces"))
        nixl = NixlPair(a, b, pair.shape.num_bytes)
        nixl.write()
        if not b.call("holds", fill=5):
            raise RuntimeError("NIXL said DONE, and the bytes are not there")
        nixl.read()
        yield nixl


def _python() -> str:
    return os.environ.get("TOLLBRIDGE_NIXL_PYTHON") or sys.executable
