"""One side of a NIXL copy over UCX TCP, as a node: 64 KiB descriptors in host memory. Needs nothing of this project.

The side that starts a WRITE holds the source; the side that starts a READ holds the destination.
"""

from __future__ import annotations

import base64
import resource
import time
from collections.abc import Sequence
from typing import Any

import numpy as np


class NixlNode:
    """See the top of the file."""

    def open(self, name: str, shape: dict[str, int], table: Sequence[int], fill: int) -> str:
        """Register a prefaulted cache; return the metadata that the other side needs."""
        from nixl._api import nixl_agent, nixl_agent_config

        self._agent: Any = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        layers, blocks, size = shape["num_layers"], shape["cache_blocks"], shape["block_bytes"]
        self._array = np.full(layers * blocks * size, fill, dtype=np.uint8)
        base = self._array.ctypes.data
        self._agent.register_memory([(base, self._array.nbytes, 0, "")], "DRAM")
        self._pieces = [(base + (layer * blocks + block) * size, size, 0) for layer in range(layers) for block in table]
        self._fill = fill
        return base64.b64encode(self._agent.get_agent_metadata()).decode()

    def pieces(self) -> list[list[int]]:
        return [list(piece) for piece in self._pieces]

    def connect(self, metadata: str, pieces: list[list[int]]) -> None:
        """Prepare descriptor lists of both sides, as vLLM's connector does, once."""
        name = self._agent.add_remote_agent(base64.b64decode(metadata))
        name = name.decode() if isinstance(name, bytes) else name
        self._local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._pieces, "DRAM")
        self._remote = self._agent.prep_xfer_dlist(name, [tuple(piece) for piece in pieces], "DRAM")

    def transfer(self, operation: str) -> dict[str, float]:
        """Run one WRITE or READ of everything; return the seconds until NIXL says DONE, building included."""
        indices = np.arange(len(self._pieces))
        begun_s, cpu_s = time.monotonic(), _cpu_s()
        handle = self._agent.make_prepped_xfer(operation, self._local, indices, self._remote, indices)
        state = self._agent.transfer(handle)
        while state == "PROC":
            time.sleep(0)
            state = self._agent.check_xfer_state(handle)
        seconds = time.monotonic() - begun_s
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL ended {state}")
        return {"seconds": seconds, "cpu_s": _cpu_s() - cpu_s}

    def holds(self, fill: int) -> bool:
        """Return whether every piece here consists of `fill`."""
        base = self._array.ctypes.data
        return all((self._array[at - base : at - base + size] == fill).all() for at, size, _ in self._pieces)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
