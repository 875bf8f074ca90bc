"""Who is examined: the workers that a router, a cluster file or the command line names."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp
import msgspec

from tollbridge.config.address import parse_address
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
    """Return the two workers named by URL; ConfigError for what is no URL or no KV address."""
    return [
        Target(
            name="prefill", prefer="prefill", url=server_url(prefill, "a worker"), kv=_kv(prefill_kv, "--prefill-kv")
        ),
        Target(name="decode", prefer="decode", url=server_url(decode, "a worker"), kv=_kv(decode_kv, "--decode-kv")),
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


def server_url(text: str, whose: str) -> str:
    """Return the URL without what a client adds to it; ConfigError when it is none."""
    try:
        parts = urlsplit(text)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # a port that is no number, brackets that do not close
        fits = False
    if not fits:
        raise ConfigError(f"{text!r} is no URL of {whose}: write it like http://10.0.0.1:8100.")
    return text.rstrip("/").removesuffix("/v1")


def _kv(text: str | None, flag: str) -> str | None:
    if text is None:
        return None
    try:
        return str(parse_address(text))
    except ValueError as error:
        raise ConfigError(f"{flag} is {text!r}: it {error}.") from None
