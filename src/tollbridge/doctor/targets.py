"""Who is examined: the workers that a router, a cluster file or the command line names."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp
import msgspec

from tollbridge.config.cluster import WorkerConfig
from tollbridge.errors import ConfigError

Connector = Literal["tollbridge", "nixl", "nixl-push"]
DEFAULT_KV_PORT = 7801  # a vLLM worker's, which cannot be asked


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One worker. None: nobody has said, ask the worker."""

    name: str
    url: str
    prefer: Literal["prefill", "decode", "any"] = "any"
    engine: Literal["embedded", "vllm"] | None = None
    connector: Connector | None = None
    kv: str | None = None  # host:port


class _Fleet(msgspec.Struct, frozen=True):
    workers: list[Target]


def from_cluster(workers: list[WorkerConfig]) -> list[Target]:
    """Return the workers of the cluster file whose addresses stand in it."""
    return [
        Target(
            name=worker.name,
            url=worker.url.rstrip("/"),
            prefer=worker.prefer,
            engine=worker.engine,
            connector=worker.connector,
            kv=None if worker.kv.endswith(":0") else worker.kv,
        )
        for worker in workers
        if urlsplit(worker.url).port
    ]


def from_flags(prefill: str, decode: str, prefill_kv: str | None, decode_kv: str | None) -> list[Target]:
    """Return the two workers named by URL; ConfigError for what is no URL."""
    return [
        Target(name="prefill", prefer="prefill", url=_url(prefill), kv=prefill_kv),
        Target(name="decode", prefer="decode", url=_url(decode), kv=decode_kv),
    ]


async def from_router(session: aiohttp.ClientSession, url: str) -> list[Target]:
    """Return the fleet of the router at `url`; aiohttp.ClientError or TimeoutError when it does not answer as one."""
    async with session.get(f"{url}/fleet") as answer:
        answer.raise_for_status()
        body: Any = await answer.read()
    try:
        return msgspec.json.decode(body, type=_Fleet).workers
    except msgspec.DecodeError:
        raise aiohttp.ClientPayloadError("its /fleet is none of a Tollbridge router") from None


def pairs_of(targets: list[Target]) -> list[tuple[Target, Target]]:
    """Return the prefill and decode workers that may share a split, at most one pair for each decode worker."""
    prefills = [target for target in targets if target.prefer == "prefill"] or targets
    decodes = [target for target in targets if target.prefer == "decode"] or targets
    others = [(decode, [prefill for prefill in prefills if prefill.name != decode.name]) for decode in decodes]
    return [(choices[index % len(choices)], decode) for index, (decode, choices) in enumerate(others) if choices]


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{text} is no URL of a worker: write it like http://10.0.0.1:8100.")
    return text.rstrip("/").removesuffix("/v1")
