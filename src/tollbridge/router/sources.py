"""Where a worker publishes its KV events: the cluster file says, or the worker itself.

An address that only means "here" or "everywhere" to the worker is of no use to the router: then the host of its URL.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import urlsplit

_EVERYWHERE = ("*", "", "0.0.0.0", "::")  # noqa: S104 - recognised in order to be replaced
_SCHEME = "tcp://"


class Source(NamedTuple):
    """What to dial: `events` is a PUB socket, `replay` a ROUTER that repeats past batches."""

    events: str
    replay: str | None

    def with_neighbour(self) -> Source:
        """Return the same with the next port as the replay socket."""
        host, _, port = self.events.rpartition(":")
        return Source(self.events, f"{host}:{int(port) + 1}")


def source_of(
    url: str, events: str | None, replay: str | None, said_events: str | None, said_replay: str | None
) -> Source | None:
    """Return where to dial; None when nobody knows a port.

    `events` and `replay` are the cluster file's: they count when they name a port, otherwise what the worker says.
    """
    if events is None:
        return None
    host = urlsplit(url).hostname or ""
    found = dialled(events, host) or dialled(said_events, host)
    return Source(found, dialled(replay, host) or dialled(said_replay, host)) if found else None


def dialled(endpoint: str | None, host: str) -> str | None:
    """Return `endpoint` as it can be dialled, `host` standing in for a wildcard; None when it names no port."""
    if endpoint is None or not endpoint.startswith(_SCHEME):
        return None
    bound, _, port = endpoint.removeprefix(_SCHEME).rpartition(":")
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        return None
    name = bound.strip("[]")
    name = host if name in _EVERYWHERE else name
    return f"{_SCHEME}{f'[{name}]' if ':' in name else name}:{port}" if name else None


def said_by_vllm(answer: Any) -> tuple[str | None, str | None]:
    """Return (events, replay) of the first engine in an answer of vLLM's /kv_event_sources."""
    sources = list(answer.values()) if isinstance(answer, dict) else []
    first = sources[0] if sources else None
    if not isinstance(first, dict) or not first.get("enable_kv_cache_events") or first.get("publisher") != "zmq":
        return None, None
    events, replay = first.get("endpoint"), first.get("replay_endpoint")
    return (events if isinstance(events, str) else None), (replay if isinstance(replay, str) else None)
