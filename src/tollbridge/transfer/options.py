"""Settings of a medium."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Literal

from tollbridge.errors import ConfigError
from tollbridge.transfer.channel import TlsFiles
from tollbridge.transfer.frames import MAX_PAYLOAD_BYTES

MAX_STREAMS = 64
AUTO = "auto"
MEDIA = (AUTO, "tcp", "shm", "nixl")

_TIMEOUTS = (
    "heartbeat_s", "progress_timeout_s", "unknown_timeout_s", "open_timeout_s", "handshake_timeout_s",
    "answer_timeout_s",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TransferOptions:
    """How one process sends and receives KV. Times in seconds, sizes in bytes.

    Raises ConfigError when a value makes no sense, or when the listener is reachable from other hosts without a secret.
    """

    secret: bytes | None = field(default=None, repr=False)  # the cluster secret; never in a log
    tls: TlsFiles | None = None  # None: frames travel in the clear
    media: str = "tcp"  # what carries payloads: tcp, shm, nixl, or auto: the best that both sides have
    io: Literal["auto", "threads", "process"] = "auto"  # auto: a process where the KV memory can be shared
    codec: str = "none"  # how KV travels: none, fp8 (see codec.py); both sides must say the same
    bind_host: str = "127.0.0.1"
    bind_port: int = 0  # 0: choose a free one
    advertise_host: str | None = None  # what `address` says; None: the bound address
    heartbeat_s: float = 1.0
    progress_timeout_s: float = 5.0  # no byte and no heartbeat for so long: the transfer (or connection) is dead
    unknown_timeout_s: float = 10.0  # decode waits so long for the prefill request to arrive
    open_timeout_s: float = 30.0  # prefill waits so long, once all is computed, for decode to ask
    handshake_timeout_s: float = 5.0  # dial and handshake
    answer_timeout_s: float = 20.0  # an I/O process that takes no order and gives no answer for so long is ended
    streams: int | None = None  # connections per prefill worker, and I/O threads; None: as the KV memory needs
    ring_bytes: int | None = None  # pinned host memory of each side when the KV is on a GPU; None: a fitting size
    min_frame_bytes: int = 64 * 1024
    max_frame_bytes: int | None = None  # None: as the KV memory needs
    frame_s: float = 0.03  # a frame is at most so much of the link's goodput: cancel waits for the rest of one frame
    bandwidth_cap_bytes_per_s: float | None = None
    max_pending_opens: int = 4096  # transfers that decode opened and prefill does not know (yet)
    max_unauthenticated: int = 64  # connections still in their handshake
    max_connections: int = 1024
    socket_buffer_bytes: int | None = None  # None: the kernel's autotuning, which a fixed size switches off
    dscp: int = 0  # 0..63, class of service of our packets

    def __post_init__(self) -> None:
        for name in _TIMEOUTS:
            _require(getattr(self, name) > 0, f"{name} must be positive")
        _require(self.heartbeat_s < self.progress_timeout_s, "heartbeat_s must be less than progress_timeout_s")
        _require(
            0 < self.min_frame_bytes <= (self.max_frame_bytes or MAX_PAYLOAD_BYTES) <= MAX_PAYLOAD_BYTES,
            f"min_frame_bytes <= max_frame_bytes <= {MAX_PAYLOAD_BYTES} must hold",
        )
        _require(self.media in MEDIA, f"media must be one of {', '.join(MEDIA)}, not {self.media!r}")
        _require(
            self.media != "nixl" or self.tls is None,
            "media nixl moves KV outside of TLS: use auto, tcp or shm with tls",
        )
        cap = self.bandwidth_cap_bytes_per_s
        _require(cap is None or cap > 0, "bandwidth_cap_bytes_per_s must be positive or absent")
        _require(self.streams is None or 0 < self.streams <= MAX_STREAMS, f"streams must be within 1..{MAX_STREAMS}")
        _require(self.ring_bytes is None or self.ring_bytes > 0, "ring_bytes must be positive or absent")
        _require(0 <= self.dscp < 64, "dscp must be within 0..63")
        _require(0 <= self.bind_port < 65536, "bind_port must be within 0..65535")

    def require_secret(self) -> None:
        """Raise ConfigError when a listener with these options would serve other hosts without a secret."""
        if not self.secret and not is_loopback(self.bind_host):
            raise ConfigError(
                f"The KV listener on {self.bind_host} needs a cluster secret: set TOLLBRIDGE_SECRET, "
                "or bind it to 127.0.0.1."
            )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`; a name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ConfigError(f"Transfer option {sentence}.")
