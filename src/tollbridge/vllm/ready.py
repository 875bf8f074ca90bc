"""When is a layer's KV really in memory? The seam between the forward pass and what is published.

`save_kv_layer` runs in the host when the work of that layer has been *issued*. On a CPU that is when it has been done.
On a GPU it has only been enqueued, but there the sender itself fences what is published (`KVMemory.fence`: an event on
the engine's stream), so `AtOnce` serves both; an engine whose memory has no fence needs another implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class LayerReady(Protocol):
    """Tells when everything that was issued so far has been computed."""

    def after(self, publish: Callable[[], None]) -> None:
        """Call `publish`, from any thread, once all that this thread has issued so far is in memory."""
        ...

    def close(self) -> None:
        """Stop calling back; on return nothing is called any more."""
        ...


class AtOnce:
    """What was issued has been computed, or the memory's own fence waits until it has."""

    def after(self, publish: Callable[[], None]) -> None:
        publish()

    def close(self) -> None:
        """Nothing: there is no thread."""
