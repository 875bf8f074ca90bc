"""Our transfer between two hosts without an engine: KVSender and KVReceiver over host memory, as workers use them.

The cache is small and its blocks are named again and again, so a transfer may be as long as a fast link needs without
more memory than `CACHE_BYTES`. The fingerprint is a probe's own: no worker would exchange KV with it.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from tollbridge.errors import TransferError
from tollbridge.transfer.base import Fingerprint, KVReceiver, KVSender, LoadRequest, TransferEnd, content_digest
from tollbridge.transfer.memory import BufferMemory
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.outboard import make_receiver, make_sender
from tollbridge.transfer.shared import SharedBuffer

LAYERS, LAYER_TOKEN_BYTES, BLOCK_TOKENS, BLOCKS = 32, 4096, 16, 32
TOKEN_BYTES = LAYERS * LAYER_TOKEN_BYTES  # 128 KiB, as a model of 8 B with grouped-query attention has
CACHE_BYTES = TOKEN_BYTES * BLOCK_TOKENS * BLOCKS
LOAD_TIMEOUT_S = 60.0
_DIGEST = content_digest([])
_FINGERPRINT = Fingerprint(
    model="tollbridge-probe",
    dtype="bytes",
    num_layers=LAYERS,
    num_kv_heads=1,
    head_size=LAYER_TOKEN_BYTES // 2,
    block_size=BLOCK_TOKENS,
    layout="token-major:k,v",
)


@dataclass(frozen=True, kw_only=True)
class KvSettings:
    """How one end binds and proves itself."""

    host: str
    secret: bytes = field(repr=False)

    def options(self, streams: int) -> TransferOptions:
        return TransferOptions(secret=self.secret or None, bind_host=self.host, streams=streams, io="auto")


class KvSource:
    """The prefill side."""

    def __init__(self, settings: KvSettings, streams: int) -> None:
        self._shared = SharedBuffer(CACHE_BYTES)
        self._sender: KVSender = make_sender(_memory(self._shared), _FINGERPRINT, settings.options(streams))
        self.port = self._sender.address[1]

    def offer(self, transfer_id: str, num_tokens: int) -> None:
        """Let the other side load `num_tokens`, all computed."""
        self._sender.poll()
        self._sender.register(transfer_id, digest=_DIGEST, num_tokens=num_tokens)
        self._sender.publish(transfer_id, _table(num_tokens), num_tokens)

    def close(self) -> None:
        self._sender.close()


class KvSink:
    """The decode side."""

    def __init__(self, settings: KvSettings, streams: int) -> None:
        self._shared = SharedBuffer(CACHE_BYTES)
        self._receiver: KVReceiver = make_receiver(_memory(self._shared), _FINGERPRINT, settings.options(streams))
        self._changed = threading.Event()
        self._receiver.set_listener(self._changed.set)

    def load(self, transfer_id: str, num_tokens: int, host: str, port: int) -> float:
        """Return the seconds from asking to the last byte, checked; TransferError says why it did not arrive."""
        begun_s = time.monotonic()
        self._receiver.open(
            LoadRequest(
                transfer_id=transfer_id,
                host=host,
                port=port,
                digest=_DIGEST,
                first_token=0,
                num_tokens=num_tokens,
                block_table=_table(num_tokens),
            )
        )
        end = self._end_of(transfer_id, begun_s + LOAD_TIMEOUT_S)
        seconds = time.monotonic() - begun_s
        if end is None:
            self._receiver.cancel(transfer_id, "the probe gave up")
            raise TransferError(f"it took more than {LOAD_TIMEOUT_S:g} s.")
        if end.outcome != "done":
            raise TransferError(f"{end.reason}: {end.detail or end.outcome}")
        return seconds

    def close(self) -> None:
        self._receiver.close()

    def _end_of(self, transfer_id: str, deadline_s: float) -> TransferEnd | None:
        while (left_s := deadline_s - time.monotonic()) > 0:
            self._changed.wait(left_s)
            self._changed.clear()
            for end in self._receiver.poll():
                if end.transfer_id == transfer_id:
                    return end
        return None


def _memory(shared: SharedBuffer) -> BufferMemory:
    """Return a cache in `shared`, which lives as long as its user."""
    shared.data[:] = bytes(range(256)) * (CACHE_BYTES // 256)  # touched, so that no page is missing when it is timed
    memory = BufferMemory(
        shared.data, num_layers=LAYERS, num_blocks=BLOCKS, block_size=BLOCK_TOKENS, token_bytes=LAYER_TOKEN_BYTES
    )
    memory.shared_fd = shared.fd
    return memory


def _table(num_tokens: int) -> list[int]:
    return [index % BLOCKS for index in range(-(-num_tokens // BLOCK_TOKENS))]
