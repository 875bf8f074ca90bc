"""④ The transfer media of one worker: what the cluster file says, as a sender and a receiver for the engine.

The engine owns both and closes them. A worker without the cluster secret gets none: it could not tell the router's
params from a stranger's, so it refuses them all, and serves locally.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tollbridge.config.address import Address, parse_address
from tollbridge.config.cluster import ClusterConfig, TransferConfig, WorkerConfig
from tollbridge.errors import ConfigError
from tollbridge.transfer.base import Fingerprint, KVMemory, KVReceiver, KVSender, TransferStatistics
from tollbridge.transfer.channel import TlsFiles
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.outboard import make_receiver, make_sender


class Media:
    """Makes the two sides when the engine asks for them, and remembers them for the metrics."""

    def __init__(self, options: TransferOptions) -> None:
        self.options = options
        self._sender: KVSender | None = None
        self._receiver: KVReceiver | None = None

    def make_sender(self, memory: KVMemory, fingerprint: Fingerprint) -> KVSender:
        self._sender = make_sender(memory, fingerprint, self.options)
        return self._sender

    def make_receiver(self, memory: KVMemory, fingerprint: Fingerprint) -> KVReceiver:
        self._receiver = make_receiver(memory, fingerprint, self.options)
        return self._receiver

    @property
    def kv(self) -> str | None:
        """Where decode dials, as host:port; None before the engine has asked for a sender."""
        if self._sender is None:
            return None
        host, port = self._sender.address
        return str(Address(host=host, port=port))

    def statistics(self) -> dict[str, TransferStatistics]:
        """Return the statistics by side."""
        sides = {"send": self._sender, "receive": self._receiver}
        return {side: medium.statistics() for side, medium in sides.items() if medium is not None}


def maybe_media(cluster: ClusterConfig, worker: WorkerConfig, secret: bytes | None) -> Media | None:
    """Return the media of `worker`, None without a secret; ConfigError for a setting that no medium has yet."""
    _refuse_unsupported(cluster.transfer)
    if not secret:
        return None
    address, tls = parse_address(worker.kv), cluster.transfer.tls
    return Media(
        TransferOptions(
            secret=secret,
            tls=TlsFiles(**msgspec.structs.asdict(tls)) if tls else None,
            media=cluster.transfer.media,
            io=cluster.transfer.io,
            codec=cluster.transfer.codec,
            bind_host=address.host,
            bind_port=address.port,
            streams=_maybe_number(cluster.transfer.streams),
            ring_bytes=_maybe_bytes(cluster.transfer.ring_mib),
            bandwidth_cap_bytes_per_s=cluster.transfer.bandwidth_cap,
        )
    )


def _refuse_unsupported(transfer: TransferConfig) -> None:
    if transfer.media == "loopback":
        raise ConfigError(
            "transfer.media loopback works within one process only: use auto, tcp, shm or nixl for workers."
        )


def _maybe_number(value: int | Literal["auto"]) -> int | None:
    return None if value == "auto" else value


def _maybe_bytes(mib: int | Literal["auto"]) -> int | None:
    return None if mib == "auto" else mib << 20
