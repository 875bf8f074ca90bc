"""The contract of every transfer medium (`tcp`, `loopback`, ...), seen from the engine.

Roles. *Send* is the prefill side: it listens, and pushes KV as the engine publishes it. *Receive* is the decode side:
it dials the prefill side, opens a transfer for exactly the token range that it lacks, and writes what arrives into
its own blocks.

Ownership, the rule everything else follows from:
  * Blocks named in `publish` are pinned by the engine until `poll` returns that transfer's `TransferEnd`. After the end
    (or after `rewind` returned) no thread of the sender reads them.
  * Blocks named in `LoadRequest` belong to the receiver from `open` until `poll` returns the `TransferEnd`. After the
    end no thread of the receiver writes into them, so the engine may reuse them at once.
  * Every registered or opened transfer ends exactly once on each side: done, failed or cancelled.
  * `done` on the receive side means: every (layer, token) of the range arrived, checksums, ids and digest fit.
    Anything else is `failed`, and the engine recomputes.

All methods may be called from the engine's thread and never block on the network. `set_listener` installs a callback
which any thread of the medium may call when `poll` has something new; it must be cheap (set a flag, notify).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import msgspec

from tollbridge.transfer.stage import Fence, Stage
from tollbridge.wire.params import TransferReport

TransferEnd = TransferReport  # an end is what the report says; one struct serves the engine, the wire and the router


class Reason:
    """Codes of `TransferEnd.reason`, used as metric labels."""

    UNKNOWN = "unknown_transfer"  # the prefill request never arrived within the unknown timeout
    DIGEST = "digest_mismatch"  # the two sides computed KV from different tokens
    CHECKSUM = "checksum"
    PROTOCOL = "protocol"
    HANDSHAKE = "handshake"
    PEER_LOST = "peer_lost"
    STALLED = "stalled"  # no progress within the deadline
    NOT_OPENED = "not_opened"  # decode never asked for it
    PEER_CANCELLED = "peer_cancelled"  # the other side cancelled: prefill ends cancelled, decode failed (it recomputes)
    CANCELLED = "cancelled"
    PINNED_BOUND = "pinned_bound"  # prefill held more finished, unsent KV than it may
    SHUTDOWN = "shutdown"
    IO_LOST = "io_lost"  # the process that moves this worker's KV died


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must be equal for KV bytes of one process to mean the same in another."""

    model: str  # digest of the config fields that shape the KV, and of the weights
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size: int
    layout: str  # by content, e.g. "token-major:k,v": the order of bytes, not an engine's name for it
    isa: str = "any"  # instruction set when the engine packs KV by it, "any" otherwise
    codec: str = "none"  # how KV travels, see codec.py
    tp_rank: int = 0
    tp_size: int = 1


class KVMemory(Protocol):
    """The paged KV memory of one process: its geometry, and the way between it and a socket.

    Logical token t of a sequence lives in block `block_table[t // block_size]`. A *granule* is the smallest run of
    tokens that is a run of bytes: one token where a block is ordered by token, a whole block where it is not. It
    divides `block_size`. Ranges to load begin on a granule's edge, frames carry whole granules, and the partly filled
    last granule of a range ships whole, once all of the range is published.
    """

    num_layers: int
    num_blocks: int
    block_size: int  # tokens
    granule: int  # tokens
    granule_bytes: int  # of one granule in one layer
    max_frame_bytes: int  # of payload, when the options name no number
    num_streams: int  # connections that it takes to keep up with this memory, when the options name no number
    batch_bytes: int  # where a frame is dear whatever its size: what of a pass is worth a frame before its end; 0: all

    def fence(self) -> Fence:
        """Return a fence behind all that the calling thread has issued to this memory so far. Cheap, never blocks."""
        ...

    def stage(self, *, max_payload_bytes: int, ring_bytes: int | None) -> Stage:
        """Return a way between this memory and sockets, for one side; at most `ring_bytes` of host memory."""
        ...


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """What decode lacks: tokens [first_token, first_token + num_tokens) of all layers, into `block_table`."""

    transfer_id: str
    host: str
    port: int
    digest: bytes
    first_token: int
    num_tokens: int
    block_table: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class TransferStatistics:
    """Counters since start, and gauges of now. Bytes are bytes, times seconds."""

    medium: str  # what was asked for, "auto" among them; what a pair got is below
    active: int
    done: int
    failed: int
    cancelled: int
    payload_bytes: int
    wire_bytes: int
    num_connections: int
    goodput_bytes_per_s: float  # TCP send: of the link while busy; otherwise of the last transfers; 0: not known yet
    failures_by_reason: dict[str, int]
    num_connections_by_medium: dict[str, int] = field(default_factory=dict)
    payload_bytes_by_medium: dict[str, int] = field(default_factory=dict)
    pending_bytes: int = 0  # KV of open transfers that has still to cross
    io: Literal["threads", "process"] = "threads"  # who moves KV: threads of this process, or one beside it


class Published(NamedTuple):
    """The KV of tokens [0, num_tokens) of a transfer is in memory; `block_table` covers it."""

    transfer_id: str
    block_table: Sequence[int]
    num_tokens: int


SendState = Literal["unknown", "queued", "computing", "sending", "ended"]


class KVSender(Protocol):
    """The prefill side."""

    @property
    def address(self) -> tuple[str, int]:
        """Where decode dials, as (host, port)."""
        ...

    def register(self, transfer_id: str, *, digest: bytes, num_tokens: int) -> None:
        """Announce a transfer whose prefill is queued. Decode may have opened it already."""
        ...

    def publish(
        self, transfer_id: str, block_table: Sequence[int], num_tokens: int, *, layer: int | None = None
    ) -> None:
        """Say that the KV of tokens [0, num_tokens) is really in memory, in `layer` (None: in every layer).

        Called per layer and chunk while prefill runs, and with None for prefix-cache hits and as the final sweep.
        `block_table` must cover `num_tokens`; later calls may pass a longer table. Never lowers what was published.
        """
        ...

    def publish_all(self, chunks: Sequence[Published], *, layer: int | None = None) -> None:
        """Publish the chunks of one forward pass, which share what that costs; what comes with an equal table, less."""
        ...

    def rewind(self, transfer_id: str) -> None:
        """Forget what was published (preemption): on return no thread reads the blocks. What was sent stays valid."""
        ...

    def cancel(self, transfer_id: str, detail: str) -> None:
        """End the transfer as cancelled unless it has ended; unknown ids are ignored."""
        ...

    def shed(self, transfer_ids: Sequence[str], max_blocks: int, *, unsent_too: bool) -> None:
        """End finished sends as failed(pinned_bound) until the rest of them holds at most `max_blocks` blocks.

        `transfer_ids` are finished sends, oldest first; the newest goes first. Only those that decode has not opened
        go, or (`unsent_too`), once there are none, those of which nothing has been sent. Unknown ids are ignored.
        """
        ...

    def poll(self) -> list[TransferEnd]:
        """Return the ends since the last call."""
        ...

    def set_listener(self, notify: Callable[[], None]) -> None: ...

    def statistics(self) -> TransferStatistics: ...

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        ...

    def close(self) -> None:
        """End everything as cancelled(shutdown), stop and join the threads."""
        ...


class KVReceiver(Protocol):
    """The decode side."""

    def open(self, load: LoadRequest) -> None:
        """Ask the prefill side for `load`. An empty range ends done, after telling prefill that nothing is needed."""
        ...

    def cancel(self, transfer_id: str, detail: str) -> None:
        """Stop the wire and end as cancelled unless ended; unknown ids are ignored."""
        ...

    def poll(self) -> list[TransferEnd]:
        """Return the ends since the last call."""
        ...

    def set_listener(self, notify: Callable[[], None]) -> None: ...

    def statistics(self) -> TransferStatistics: ...

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        ...

    def close(self) -> None:
        """End everything as cancelled(shutdown), stop and join the threads."""
        ...


def content_digest(token_ids: Sequence[int], *, cache_salt: str | None = None) -> bytes:
    """Return 16 bytes that name what a KV cache was computed from: the prompt's token ids and the cache salt."""
    hasher = hashlib.blake2b(digest_size=16, person=b"tollbridge-kv-v1")
    hasher.update(msgspec.msgpack.encode((list(token_ids), cache_salt)))
    return hasher.digest()
