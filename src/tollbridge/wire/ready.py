"""The ready line: one JSON object on stdout once a worker or router serves. Port 0 means "choose"; this says which."""

from __future__ import annotations

from typing import Literal

import msgspec


class Ready(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a process listens."""

    ready: Literal["worker", "router"]
    name: str
    url: str
    pid: int
    kv: str | None = None  # host:port of the KV listener
    events: str | None = None  # ZMQ endpoint of the KV events
    model: str | None = None
    incarnation: str | None = None
