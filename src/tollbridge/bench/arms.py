"""Arms as people write them: NAME=URL,key=value,... Pure."""

from __future__ import annotations

from urllib.parse import urlsplit

from tollbridge.bench.records import Arm
from tollbridge.errors import ConfigError

_KEYS = ("policy", "workers", "gpus", "model", "key", "title")


def parse_arm(text: str) -> Arm:
    """Return the arm; ConfigError with what is wrong."""
    name, equals, rest = text.partition("=")
    url, *pairs = rest.split(",")
    if not equals or not name:
        raise ConfigError(f"{text!r} is no arm: write NAME=http://HOST:PORT.", param="arm")
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ConfigError(f"Arm {name}: {url!r} is not the URL of a server: write http://HOST:PORT.", param="arm")
    given = dict(_pair(name, pair) for pair in pairs)
    workers = [each.rstrip("/") for each in given["workers"].split("+")] if "workers" in given else []
    url = url.rstrip("/").removesuffix("/v1")
    return Arm(
        name=name, url=url, policy=given.get("policy"), model=given.get("model"), api_key_env=given.get("key"),
        title=given.get("title", ""), workers=workers or ([] if "policy" in given else [url]),
        num_workers=_count(name, given.get("gpus", str(len(workers) or 1))),
    )  # fmt: skip


def _pair(name: str, text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if key not in _KEYS or not equals or not value:
        raise ConfigError(f"Arm {name}: {text!r} is none of {', '.join(_KEYS)} with a value.", param="arm")
    return key, value


def _count(name: str, text: str) -> int:
    if not text.isdigit() or not int(text):
        raise ConfigError(f"Arm {name}: gpus={text} is not a number of 1 or more.", param="arm")
    return int(text)
