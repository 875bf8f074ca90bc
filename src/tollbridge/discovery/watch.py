"""What a list of pods and the watch behind it say there is: from bytes to a set of workers. Pure, no I/O.

The API server numbers its states (resourceVersion, opaque to us). A list gives a state; a watch from there gives every
change since, in order, and bookmarks, which only say how far it has come. The server forgets old changes: 410, in the
answer or as an event, and then only a new list helps. It replaces what was known as a whole, so what went in between
goes with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from tollbridge.config.cluster import DiscoveryConfig
from tollbridge.discovery.base import Endpoint
from tollbridge.discovery.pods import Pod, maybe_endpoint, serves

MAX_EVENT_BYTES = 16 << 20
GONE = 410


class ExpiredError(Exception):
    """The server has forgotten the state that the watch began from: list again."""


class WatchError(Exception):
    """The server says something else than a change, or nothing that can be read: list again, after a pause."""


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """One page of a list; `metadata.continue` leads to the next."""

    class Metadata(
        msgspec.Struct, frozen=True, kw_only=True, rename={"version": "resourceVersion", "rest": "continue"}
    ):
        version: str = ""
        rest: str = ""

    metadata: Metadata = Metadata()
    items: list[Pod] | None = None


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Failure(msgspec.Struct, frozen=True, kw_only=True):
    code: int = 0
    message: str = ""


class _Mark(msgspec.Struct, frozen=True, kw_only=True):
    class Metadata(msgspec.Struct, frozen=True, kw_only=True):
        version: str = msgspec.field(name="resourceVersion", default="")

    metadata: Metadata


class _Known(NamedTuple):
    """A pod that matches, reduced to what is needed of it."""

    uid: str
    serves: bool
    endpoint: Endpoint | None


class Lines:
    """Cuts a stream into lines, whatever pieces it comes in."""

    def __init__(self, max_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []
        self._num_bytes = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the lines that `piece` completes; WatchError when one is beyond the bound."""
        first, *more = piece.split(b"\n")
        self._pieces.append(first)
        self._num_bytes += len(first)
        if self._num_bytes > self._max_bytes:
            raise WatchError(f"a line of the watch has more than {self._max_bytes} bytes")
        if not more:
            return []
        lines = [b"".join(self._pieces), *more[:-1]]
        self._pieces, self._num_bytes = [more[-1]], len(more[-1])
        return [line for line in lines if line.strip()]


class Store:
    """The pods that match, as far as they are known. `version`: where to watch from; None: list first."""

    def __init__(self, config: DiscoveryConfig) -> None:
        self._config = config
        self._known: dict[str, _Known] = {}  # by name
        self.version: str | None = None

    def replace(self, pods: Iterable[Pod], version: str) -> None:
        """Take a complete list."""
        self._known = {pod.metadata.name: self._seen(pod) for pod in pods}
        self.version = version

    def take(self, line: bytes) -> None:
        """Take one line of the watch; ExpiredError or WatchError when it is the end of it."""
        try:
            event = msgspec.json.decode(line, type=_Event)
            self._take(event)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WatchError(f"an event of the watch cannot be read: {error}") from error

    def endpoints(self) -> list[Endpoint]:
        """Return the workers, by name."""
        found = (self._known[name].endpoint for name in sorted(self._known))
        return [endpoint for endpoint in found if endpoint is not None]

    @property
    def num_ignored(self) -> int:
        """How many pods match and are no workers: no known role, or followers in a group."""
        return sum(not known.serves for known in self._known.values())

    def _seen(self, pod: Pod) -> _Known:
        return _Known(pod.metadata.uid, serves(pod), maybe_endpoint(pod, self._config))

    def _take(self, event: _Event) -> None:
        if event.type == "ERROR":
            failure = msgspec.json.decode(event.object, type=_Failure)
            if failure.code == GONE:
                raise ExpiredError(failure.message)
            raise WatchError(f"the watch ended with {failure.code}: {failure.message[:200]}")
        if event.type == "BOOKMARK":
            self.version = msgspec.json.decode(event.object, type=_Mark).metadata.version or self.version
            return
        if event.type not in ("ADDED", "MODIFIED", "DELETED"):
            raise WatchError(f"the watch has an event of type {event.type[:40]!r}")
        self._change(event.type, msgspec.json.decode(event.object, type=Pod))

    def _change(self, kind: str, pod: Pod) -> None:
        name = pod.metadata.name
        if kind != "DELETED":
            self._known[name] = self._seen(pod)
        elif name in self._known and self._known[name].uid == pod.metadata.uid:
            del self._known[name]  # and not another pod that has its name by now
        self.version = pod.metadata.resource_version or self.version
