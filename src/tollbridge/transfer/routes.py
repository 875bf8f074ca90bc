"""Which media a side may use, by its options and by what this machine has, and the rings that belong to them."""

from __future__ import annotations

from collections.abc import Callable

from tollbridge.errors import ProtocolError, TransferError
from tollbridge.transfer.messages import Ring
from tollbridge.transfer.nixl import NIXL, NixlAgent, has_fast_link, require_nixl
from tollbridge.transfer.options import AUTO, TransferOptions
from tollbridge.transfer.placed import TCP, Inlet, Outlet
from tollbridge.transfer.shm import SHM, ShmInlet, ShmOutlet
from tollbridge.transfer.stage import Stage


def require_media(options: TransferOptions) -> None:
    """ConfigError when a medium is asked for that is not installed."""
    if options.media == NIXL:
        require_nixl()


class MediaRoutes:
    """Implements placed.Routes. ConfigError when a medium is asked for that does not start.

    `expects` says whether payloads are expected, on the side that receives them; `stir` it when it begins to.
    """

    def __init__(
        self,
        options: TransferOptions,
        stage: Stage,
        *,
        granule_bytes: int,
        expects: Callable[[], bool] | None = None,
    ) -> None:
        self._wanted = options.media
        self._granule_bytes = granule_bytes
        self._agent: NixlAgent | None = None
        if options.media == NIXL or (options.media == AUTO and options.tls is None and has_fast_link()):
            self._agent = NixlAgent(stage.regions(), bool) if expects is None else NixlAgent([], expects)

    def names(self, same_host: Callable[[], bool]) -> tuple[str, ...]:
        if self._wanted != AUTO:
            return (self._wanted,)
        fast = (NIXL,) if self._agent is not None else ()
        near = (SHM,) if same_host() else ()  # for a peer that insists: TCP costs as much (docs/LOG.md)
        return (*fast, TCP, *near)

    def inlet(self, medium: str) -> Inlet:
        if medium == SHM:
            return ShmInlet(granule_bytes=self._granule_bytes)
        if medium == NIXL and self._agent is not None:
            return self._agent.inlet(granule_bytes=self._granule_bytes)
        raise ProtocolError(f"There is no ring for {medium} here.")

    def outlet(self, ring: Ring) -> Outlet:
        if ring.slot_bytes < self._granule_bytes:
            raise TransferError(f"A slot of {ring.slot_bytes} bytes is too small for {self._granule_bytes} at a time.")
        if ring.medium == SHM:
            return ShmOutlet(ring)
        if ring.medium == NIXL and self._agent is not None:
            return self._agent.outlet(ring)
        raise ProtocolError(f"There is no way to a ring of {ring.medium} here.")

    def stir(self) -> None:
        if self._agent is not None:
            self._agent.pump.stir()

    def close(self) -> None:
        """Free what the media hold. All connections are closed."""
        if self._agent is not None:
            self._agent.close()
