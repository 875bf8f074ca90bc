"""`GET /tollbridge/status`: what a worker says about itself, for the router, `tollbridge top` and people."""

from __future__ import annotations

from typing import Any

import msgspec


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`engine` is an EngineStatistics, `transfer` a TransferStatistics by side ("send", "receive")."""

    name: str
    model: str
    incarnation: str  # random per process: a new one means that every cached block is gone
    kv: str | None  # host:port of the KV listener; None: this worker takes no part in splits
    events: str | None  # ZMQ endpoint of the KV events
    replay: str | None  # ZMQ endpoint that repeats past events
    draining: bool
    num_open: int  # requests inside the door
    max_open: int  # more get 429
    max_model_len: int
    block_size: int  # tokens
    kv_bytes_per_token: int
    rss_bytes: int = 0  # resident memory of the process; 0: not known
    memory_limit_bytes: int = 0  # of its control group, or of the machine
    engine: dict[str, Any]
    transfer: dict[str, dict[str, Any]]
