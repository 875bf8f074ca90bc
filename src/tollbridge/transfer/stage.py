"""How KV gets from a cache to a socket and back: the seam between a medium and the kind of memory behind it.

The send side *lifts* a span into a `Parcel`, whose bytes go to the socket once `load` returned them. The receive side
*lands* a payload: it fills the buffers of a `Landing`, and `commit` says that they hold what was meant. In host memory
both alias the cache (`DirectStage`, below); GPU memory goes through a ring of pinned host memory (staging.py).

Who still touches the blocks, the question that ends of transfers hang on, has one answer here: nobody once
`Parcel.settle` returned, and nobody once `Stage.settle` returned for a transfer whose landings are committed or closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from xxhash import xxh3_64


class Span(NamedTuple):
    """Tokens [first_token, first_token + num_tokens) of `num_layers` layers from `layer` on, in the blocks of `table`.

    As bytes: layer by layer.
    """

    layer: int
    table: Sequence[int]
    first_token: int
    num_tokens: int
    num_layers: int = 1

    @property
    def layers(self) -> range:
        return range(self.layer, self.layer + self.num_layers)


class Fence(Protocol):
    """A point in the work that was issued to a device; it is behind us once all work before it was done."""

    def done(self) -> bool: ...
    def wait(self) -> None: ...


class Parcel(Protocol):
    """The payload of one frame on its way out. Used by one thread at a time: its writer holds a lock."""

    num_bytes: int

    def load(self) -> tuple[int, list[memoryview]]:
        """Return the checksum of the payload and its bytes; waits for a copy engine at most."""
        ...

    def copy_to(self, target: memoryview) -> None:
        """Copy the payload to `target`, which it fills, instead of loading it."""
        ...

    def settle(self, rest: list[memoryview] | None) -> list[memoryview]:
        """Let go of the blocks. `rest` is what is left of the loaded frame (None: not loaded); return it, safe."""
        ...

    def close(self) -> None:
        """Give back what the parcel holds: it was sent, or nobody wants it. Lets go of the blocks too."""
        ...


class Landing(Protocol):
    """Where the payload of one frame goes. No buffers: nobody wants it."""

    buffers: Sequence[memoryview]
    batch_bytes: int  # to receive and hash at a time

    def fill(self, payload: memoryview) -> None:
        """Copy a whole payload to the buffers."""
        ...

    def commit(self) -> None:
        """The buffers hold the payload and its checksum fits: bring it to its blocks."""
        ...

    def close(self) -> None:
        """Give up on a payload that was not committed."""
        ...


class Stage(Protocol):
    """One side's way between cache and sockets, shared by its connections. Thread-safe."""

    @property
    def depth(self) -> int:
        """How many parcels a connection may hold ready behind the one that it sends; 0: it lifts when it needs one."""
        ...

    @property
    def max_payload_bytes(self) -> int:
        """No frame may have more."""
        ...

    def join(self) -> None:
        """One more connection shares the stage."""
        ...

    def leave(self) -> None: ...

    def regions(self) -> list[memoryview]:
        """Return the memory in which parcels lie when they are loaded, as far as it is known; for a NIC to read."""
        ...

    def has_room(self) -> bool:
        """Whether `lift` and `land` may be called now; one of them uses the room up."""
        ...

    def lift(self, span: Span) -> Parcel: ...

    def land(self, transfer: bytes, span: Span, after: Fence) -> Landing:
        """Return where a payload of `transfer` goes; the blocks are not touched before `after` is behind us."""
        ...

    def settle(self, transfer: bytes) -> None:
        """Return when all that was committed for `transfer` is in its blocks."""
        ...

    def check(self) -> None: ...

    def close(self) -> None: ...


class _Passed:
    """The fence of memory that the CPU writes: what was issued has been done."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing to wait for."""


class _Nowhere:
    """The landing of a payload that nobody wants."""

    buffers: Sequence[memoryview] = ()
    batch_bytes = 0

    def fill(self, payload: memoryview) -> None:
        """Nothing to fill."""

    def commit(self) -> None:
        """Nothing to bring anywhere."""

    def close(self) -> None:
        """Nothing to give back."""


PASSED: Fence = _Passed()
NOWHERE: Landing = _Nowhere()


class Viewable(Protocol):
    """Memory that the CPU can address (memory.HostMemory)."""

    def span_views(self, span: Span) -> list[memoryview]: ...
    def regions(self) -> list[memoryview]: ...
    def copy_out(self, span: Span, target: memoryview) -> None: ...
    def copy_in(self, source: memoryview, span: Span) -> None: ...


class DirectStage:
    """The stage of host memory: no copy, and nothing to wait for."""

    depth = 0  # what is not copied need not be prepared ahead

    def __init__(self, memory: Viewable, max_payload_bytes: int) -> None:
        self.max_payload_bytes = max_payload_bytes
        self._memory = memory

    def join(self) -> None:
        """Connections share nothing."""

    def leave(self) -> None:
        """See join."""

    def regions(self) -> list[memoryview]:
        return self._memory.regions()

    def has_room(self) -> bool:
        return True

    def lift(self, span: Span) -> Parcel:
        return _DirectParcel(self._memory, span)

    def land(self, transfer: bytes, span: Span, after: Fence) -> Landing:
        return _DirectLanding(self._memory, span)

    def settle(self, transfer: bytes) -> None:
        """Committed is arrived."""

    def check(self) -> None:
        """No state, no invariant."""

    def close(self) -> None:
        """Nothing to free."""


class _DirectParcel:
    """Views of the cache, borrowed until they are sent."""

    def __init__(self, memory: Viewable, span: Span) -> None:
        self._memory = memory
        self._span: Span | None = span  # None: the views are a copy
        self._views = memory.span_views(span)
        self.num_bytes = sum(map(len, self._views))

    def copy_to(self, target: memoryview) -> None:
        if self._span is not None:
            self._memory.copy_out(self._span, target)
        else:
            target[:] = self._views[0]

    def load(self) -> tuple[int, list[memoryview]]:
        checksum = xxh3_64()
        update = checksum.update
        for view in self._views:
            update(view)
        return checksum.intdigest(), self._views

    def settle(self, rest: list[memoryview] | None) -> list[memoryview]:
        if rest is None:
            self._views, self._span = [memoryview(b"".join(self._views))], None
            return []
        return [memoryview(b"".join(rest))]

    def close(self) -> None:
        self._views = []


class _DirectLanding:
    """Views of the cache, written by the socket."""

    batch_bytes = (
        256 * 1024
    )  # fits the CPU's cache: hashing what is still in L2 costs a fifth of hashing it from memory

    def __init__(self, memory: Viewable, span: Span) -> None:
        self.buffers: Sequence[memoryview] = memory.span_views(span)
        self._memory = memory
        self._span = span

    def fill(self, payload: memoryview) -> None:
        self._memory.copy_in(payload, self._span)

    def commit(self) -> None:
        """The bytes are where they belong."""

    def close(self) -> None:
        """The blocks belong to the receiver, whatever is in them."""
