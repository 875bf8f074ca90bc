"""The state of one transfer on each side, without I/O: what may be sent next, what has arrived, what is overdue.

Send side. The engine publishes token watermarks per layer; decode opens a range. Whatever is published, within the
range and not yet sent may leave, lowest layer first. Where frames are dear (`KVMemory.batch_bytes`), layers that are
ready together share one, and the first layers of a pass wait for the next ones until they are worth one, or the pass is
through: its last layer is published, so nothing is waited for that may be long in coming. `sent` only grows: bytes
given to the kernel were copied, so a rewind (preemption) forgets what was published and nothing else. As both are
watermarks, a completeness sweep is a comparison per layer.

Receive side. Completeness is a set of tokens per layer, not a watermark, so frames may come twice or in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tollbridge.clock import Clock
from tollbridge.errors import ProtocolError
from tollbridge.transfer.base import KVMemory, LoadRequest, Reason, SendState
from tollbridge.transfer.frames import MAX_PAYLOAD_BYTES, Header, transfer_key
from tollbridge.transfer.intervals import IntervalSet
from tollbridge.transfer.options import TransferOptions
from tollbridge.transfer.stage import PASSED, Fence, Span
from tollbridge.transfer.tally import Tally, Verdict


def payload_bytes(memory: KVMemory, num_tokens: int) -> int:
    """Return the bytes of `num_tokens` from a granule's edge on: a partial last granule ships whole."""
    return -(-num_tokens // memory.granule) * memory.granule_bytes


class Chunk(NamedTuple):
    """One DATA frame to be composed: tokens [first_token, first_token + num_tokens) of a run of layers."""

    layer: int
    num_layers: int
    first_token: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What decode asked for, on which connection."""

    connection: int
    epoch: int
    digest: bytes
    first_token: int
    num_tokens: int
    max_payload_bytes: int = MAX_PAYLOAD_BYTES  # decode takes no larger frame

    @property
    def end_token(self) -> int:
        return self.first_token + self.num_tokens


class SendSession:
    """One transfer on the prefill side. It is unknown until registered, and idle until opened; either may be first."""

    def __init__(self, transfer: bytes, memory: KVMemory, clock: Clock) -> None:
        self.transfer = transfer
        self.tally = Tally()
        self.opening: Opening | None = None
        self.early_verdict: Verdict | None = None  # decode ended it before prefill registered it
        self.table: Sequence[int] = ()
        self.state_sent_s = 0.0
        self._clock = clock
        self._memory = memory
        self._digest: bytes | None = None
        self._num_tokens = 0
        self._published = [0] * memory.num_layers  # watermarks, in tokens
        self._sent = [0] * memory.num_layers
        self._first_layer = 0  # no layer below it has anything to send
        self._unsent_tokens = 0  # of the opened range, over all layers
        self._overdue_from_s = clock.monotonic()  # of the state it is in

    @property
    def registered(self) -> bool:
        return self._digest is not None

    @property
    def state(self) -> SendState:
        if not self.registered:
            return "unknown"
        published = self.published_tokens
        if published >= self._num_tokens:
            return "sending"
        return "computing" if any(self._published) else "queued"

    @property
    def published_tokens(self) -> int:
        """Tokens published in every layer."""
        return min(self._published)

    @property
    def blocks(self) -> Sequence[int]:
        """The blocks that hold what is published."""
        return self.table[: -(-max(self._published) // self._memory.block_size)]

    @property
    def untouched(self) -> bool:
        """Whether nothing was handed to the wire, though something could be."""
        return self.tally.num_frames == 0 and self._unsent_tokens > 0

    @property
    def remaining_bytes(self) -> int:
        return self._unsent_tokens * self._memory.granule_bytes // self._memory.granule

    @property
    def complete(self) -> bool:
        """Whether the whole opened range was handed to the wire."""
        return self.opening is not None and self._unsent_tokens == 0

    def register(self, digest: bytes, num_tokens: int) -> None:
        assert not self.registered
        self._digest, self._num_tokens = digest, num_tokens
        self._touch()

    def open(self, opening: Opening) -> None:
        assert self.opening is None
        self.opening = opening
        self.tally.opened_s = self._clock.monotonic()
        self._sent = [opening.first_token] * len(self._sent)
        self._unsent_tokens = opening.num_tokens * len(self._sent)
        self._touch()

    def mismatch(self) -> Verdict | None:
        """Return why the two sides do not fit each other, None when they do or one is still missing."""
        if self.opening is None or self._digest is None:
            return None
        if self.opening.digest != self._digest:
            detail = f"Transfer {self.transfer.hex()}: prefill and decode computed from different tokens."
            return Verdict("failed", Reason.DIGEST, detail)
        if self.opening.end_token > self._num_tokens:
            detail = f"Decode asked for tokens up to {self.opening.end_token} of a prompt of {self._num_tokens}."
            return Verdict("failed", Reason.PROTOCOL, detail)
        if self.opening.first_token % self._memory.granule:
            detail = f"Decode asked from token {self.opening.first_token}, within a granule of {self._memory.granule}."
            return Verdict("failed", Reason.PROTOCOL, detail)
        return None

    def publish(self, table: Sequence[int], num_tokens: int, layer: int | None) -> None:
        """Raise watermarks; `table` covers `num_tokens`."""
        if len(table) >= len(self.table):
            self.table = table
        was_complete = self.published_tokens >= self._num_tokens
        for index in range(len(self._published)) if layer is None else (layer,):
            self._published[index] = max(self._published[index], num_tokens)
        self._first_layer = min(self._first_layer, layer or 0)
        if not was_complete and self.published_tokens >= self._num_tokens:
            self._touch()

    def rewind(self) -> None:
        """Forget what was published, and the table with it."""
        self._published = [0] * len(self._published)
        self.table = ()

    def age_s(self, now_s: float) -> float:
        """Return the time since decode asked."""
        return now_s - (now_s if self.tally.opened_s is None else self.tally.opened_s)

    def has_data(self) -> bool:
        """Return whether `take` would return a chunk."""
        if self.opening is None or not self.registered or self._unsent_tokens == 0:
            return False
        while self._first_layer < len(self._sent):
            if self._num_ready(self._first_layer) > 0:
                return self._is_worth_a_frame()
            self._first_layer += 1
        return False

    def take(self, max_bytes: int) -> Chunk | None:
        """Return the next chunk of at most `max_bytes` (at least one granule) and count it as sent."""
        if not self.has_data():
            return None
        assert self.opening is not None
        chunk = self._next_chunk(min(max_bytes, self.opening.max_payload_bytes))
        for layer in range(chunk.layer, chunk.layer + chunk.num_layers):
            self._sent[layer] += chunk.num_tokens
        self._unsent_tokens -= chunk.num_tokens * chunk.num_layers
        now_s = self._clock.monotonic()
        self.tally.frame(payload_bytes(self._memory, chunk.num_tokens) * chunk.num_layers)
        self.tally.moved(now_s)
        self._overdue_from_s = now_s
        return chunk

    def frame_sent(self) -> None:
        """Note that the kernel took the last byte of a frame."""
        self.tally.moved(self._clock.monotonic())
        self._touch()

    def overdue(self, options: TransferOptions) -> Verdict | None:
        """Return why the transfer must end now, None when it may go on."""
        waited_s = self._clock.monotonic() - self._overdue_from_s
        if not self.registered:
            late = waited_s > 2 * options.unknown_timeout_s
            return Verdict("failed", Reason.UNKNOWN, "Prefill never got this request.") if late else None
        if self.complete and waited_s > options.progress_timeout_s:
            detail = f"Decode did not confirm the KV within {options.progress_timeout_s:g} s of the last byte."
            return Verdict("failed", Reason.STALLED, detail)
        published = self.published_tokens >= self._num_tokens
        if self.opening is None and published and waited_s > options.open_timeout_s:
            detail = f"Decode did not ask for the KV within {options.open_timeout_s:g} s."
            return Verdict("failed", Reason.NOT_OPENED, detail)
        return None

    def check(self) -> None:
        """Raise AssertionError when the counters disagree."""
        if self.opening is None:
            assert not any(self._sent)
            return
        first, end = self.opening.first_token, self.opening.end_token
        assert all(first <= sent <= end for sent in self._sent)
        assert self._unsent_tokens == sum(end - sent for sent in self._sent)

    def _next_chunk(self, max_bytes: int) -> Chunk:
        """Return what of the first layer may leave, with as many of the next ones as have just the same."""
        layer, granule = self._first_layer, self._memory.granule
        first_token, num_ready = self._sent[layer], self._num_ready(layer)
        num_tokens = min(num_ready, max(1, max_bytes // self._memory.granule_bytes) * granule)
        end_layer, layer_bytes = layer + 1, payload_bytes(self._memory, num_tokens)
        while (
            self._memory.batch_bytes
            and end_layer < len(self._sent)
            and (end_layer + 1 - layer) * layer_bytes <= max_bytes
            and self._sent[end_layer] == first_token
            and self._num_ready(end_layer) == num_ready
        ):
            end_layer += 1
        return Chunk(layer, end_layer - layer, first_token, num_tokens)

    def _is_worth_a_frame(self) -> bool:
        """Return whether what is ready is enough, or all that comes soon."""
        missing_bytes = self._memory.batch_bytes
        if missing_bytes <= 0 or self._num_ready(len(self._sent) - 1) > 0:
            return True
        for layer in range(self._first_layer, len(self._sent)):
            missing_bytes -= payload_bytes(self._memory, max(0, self._num_ready(layer)))
            if missing_bytes <= 0:
                return True
        return False

    def _num_ready(self, layer: int) -> int:
        """Return how many tokens of a layer may leave."""
        return self._ready_token(layer) - self._sent[layer]

    def _ready_token(self, layer: int) -> int:
        """Return the end of what may leave: whole granules, and the partial last one with the end of the range."""
        assert self.opening is not None
        published, end_token = self._published[layer], self.opening.end_token
        return end_token if published >= end_token else published - published % self._memory.granule

    def _touch(self) -> None:
        self._overdue_from_s = self._clock.monotonic()


class ReceiveSession:
    """One transfer on the decode side."""

    def __init__(
        self,
        load: LoadRequest,
        connection: int,
        epoch: int,
        memory: KVMemory,
        clock: Clock,
        fence: Fence = PASSED,
        *,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        self.load = load
        self.connection = connection
        self.epoch = epoch
        self.transfer = transfer_key(load.transfer_id)
        self.tally = Tally(opened_s=clock.monotonic())
        self.asked = False  # the OPEN has been sent
        self.fence = fence  # nothing may be written into the blocks before it is behind us
        self._clock = clock
        self._memory = memory
        self._max_payload_bytes = max(max_payload_bytes, memory.granule_bytes)
        self._begun = [IntervalSet() for _ in range(memory.num_layers)]  # arrived, or on one of the lanes
        self._arrived = [IntervalSet() for _ in range(memory.num_layers)]
        self._missing_tokens = load.num_tokens * memory.num_layers
        self._state: SendState = "unknown"
        self._progress_s = self._asked_s = clock.monotonic()

    @property
    def complete(self) -> bool:
        return self._missing_tokens == 0

    @property
    def remaining_bytes(self) -> int:
        return self._missing_tokens * self._memory.granule_bytes // self._memory.granule

    def ask(self) -> None:
        """Note that the OPEN is on its way: deadlines count from now."""
        self.asked = True
        self._progress_s = self._asked_s = self._clock.monotonic()

    def heard(self, state: SendState) -> None:
        """Take a heartbeat."""
        self._progress_s = self._clock.monotonic()
        if state == "unknown" and self._state != "unknown":
            self._asked_s = self._progress_s  # prefill restarted the request
        self._state = state

    def begin(self, header: Header) -> Span | None:
        """Return where the payload of `header` goes, None when all of it has arrived before or is arriving.

        Raises ProtocolError when the frame does not fit the range that was asked for.
        """
        self.tally.begun(self._clock.monotonic())
        self._require_asked_for(header)
        end, layers = header.first_token + header.num_tokens, _layers(header)
        if all(self._begun[layer].covers(header.first_token, end) for layer in layers):
            return None  # a copy must not overwrite what was verified
        num_new = sum(self._begun[layer].add(header.first_token, end) for layer in layers)
        if num_new < header.num_tokens * header.num_layers:
            raise ProtocolError(f"Prefill sent tokens {header.first_token}..{end}: some of them for the second time.")
        return Span(header.layer, self.load.block_table, header.first_token, header.num_tokens, header.num_layers)

    def moved(self) -> None:
        """Note that payload bytes arrived."""
        self._progress_s = self._clock.monotonic()
        self.tally.moved(self._progress_s)

    def arrived(self, header: Header) -> None:
        """Record a frame whose checksum fits."""
        end = header.first_token + header.num_tokens
        for layer in _layers(header):
            self._missing_tokens -= self._arrived[layer].add(header.first_token, end)

    def overdue(self, options: TransferOptions) -> Verdict | None:
        """Return why the transfer must end now, None when it may go on."""
        now_s = self._clock.monotonic()
        if not self.asked:  # the connection has a deadline of its own; this one covers name resolution as well
            late = now_s - self._asked_s > 2 * options.handshake_timeout_s
            return Verdict("failed", Reason.PEER_LOST, "The prefill worker could not be reached.") if late else None
        if now_s - self._progress_s > options.progress_timeout_s:
            detail = f"No byte and no heartbeat from prefill for {options.progress_timeout_s:g} s."
            return Verdict("failed", Reason.STALLED, detail)
        if self._state == "unknown" and now_s - self._asked_s > options.unknown_timeout_s:
            detail = f"The prefill worker did not get this request within {options.unknown_timeout_s:g} s."
            return Verdict("failed", Reason.UNKNOWN, detail)
        return None

    def check(self) -> None:
        """Raise AssertionError when the counters disagree."""
        for begun, arrived in zip(self._begun, self._arrived, strict=True):
            begun.check()
            arrived.check()
            assert all(begun.covers(*each) for each in arrived.ranges())
        total = self.load.num_tokens * len(self._arrived)
        assert self._missing_tokens == total - sum(len(arrived) for arrived in self._arrived)

    def _require_asked_for(self, header: Header) -> None:
        end, load = header.first_token + header.num_tokens, self.load
        what = f"layers {header.layer}..{header.layer + header.num_layers}, tokens {header.first_token}..{end}"
        if header.layer + header.num_layers > len(self._arrived) or not (
            load.first_token <= header.first_token and end <= load.first_token + load.num_tokens
        ):
            raise ProtocolError(f"Prefill sent {what}: not asked for.")
        granule = self._memory.granule
        if header.first_token % granule or (end % granule and end != load.first_token + load.num_tokens):
            raise ProtocolError(f"Prefill sent tokens {header.first_token}..{end}: not whole granules of {granule}.")
        if header.payload_bytes != payload_bytes(self._memory, header.num_tokens) * header.num_layers:
            raise ProtocolError(f"Prefill sent {header.payload_bytes} bytes for {what}.")
        if header.payload_bytes > self._max_payload_bytes:
            raise ProtocolError(f"Prefill sent a frame of {header.payload_bytes} bytes: there is no room for it.")


def _layers(header: Header) -> range:
    return range(header.layer, header.layer + header.num_layers)
