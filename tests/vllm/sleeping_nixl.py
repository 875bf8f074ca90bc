"""vLLM's own NIXL connectors, unchanged, with an agent that sleeps while there is nothing to do.

NIXL's progress thread calls `poll` with the agent's `pthrDelay`, which its Python package sets to 0 and nobody can set
otherwise (1.5.1): each worker spins on a core, also when idle, and holds UCX's lock meanwhile. Two workers on two cores
then leave nothing to their own engines and HTTP servers. With a millisecond `poll` sleeps, and wakes for what comes.

vLLM imports this by its `kv_connector_module_path`, in the processes of a server that tests start; nobody else does.
"""

from __future__ import annotations

from typing import Any

from nixl import _api
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector, NixlPushConnector

__all__ = ["NixlConnector", "NixlPushConnector"]

DELAY_US = 1000


class _SleepingConfig(_api.nixlBind.nixlAgentConfig):  # a class of C++
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, DELAY_US if name == "pthrDelay" else value)


_api.nixlBind.nixlAgentConfig = _SleepingConfig
