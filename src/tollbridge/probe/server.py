"""An OpenAI-compatible server as a probe sees it: what it serves, its metrics, and streams of token ids, timed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import aiohttp
import msgspec

from tollbridge.errors import (
    AuthenticationError,
    ModelNotFoundError,
    RequestError,
    UnavailableError,
    UnsupportedError,
    UpstreamError,
)
from tollbridge.probe.scrape import Reading, read
from tollbridge.wire.sse import Parser

_CONNECT_S = 5.0
_SILENCE_S = 120.0  # a prefill on a slow engine says nothing for a while
DEFAULT_MAX_MODEL_LEN = 4096  # where the server does not say


@dataclass(frozen=True, kw_only=True)
class Served:
    """What is probed."""

    model: str
    max_model_len: int
    name: str | None = None  # of a Tollbridge worker, as the cluster file has it
    max_num_batched_tokens: int | None = None


@dataclass(kw_only=True)
class Timing:
    """One stream: when how many tokens had come. Times are `time.perf_counter`."""

    sent_s: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (when, tokens so far)
    cached_tokens: int | None = None  # None: the server does not say

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0][0] - self.sent_s

    @property
    def num_tokens(self) -> int:
        return self.arrivals[-1][1]


class _Engine(msgspec.Struct):
    max_num_batched_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


class _Status(msgspec.Struct):
    name: str | None = None
    engine: _Engine | None = None


class Server:
    """Talks to one server. Use it as an async context manager. Every error is one sentence."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Server:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(timeout=timeout, headers=self._headers, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.close()

    async def served(self, model: str | None) -> Served:
        """Return what the server says of `model`, or of its only one. ModelNotFoundError names what there is."""
        cards = _cards(await self._get("/v1/models"), self.url)
        names = [str(card["id"]) for card in cards]
        if model is None and len(names) == 1:
            model = names[0]
        if model not in names:
            asked = f"The model {model!r} is not served at {self.url}" if model else f"{self.url} serves several models"
            raise ModelNotFoundError(f"{asked}: give --model with one of {', '.join(names)}.", param="model")
        length = cards[names.index(model)].get("max_model_len")
        status = await self._maybe_status()
        return Served(
            model=model,
            max_model_len=length if isinstance(length, int) and length > 0 else DEFAULT_MAX_MODEL_LEN,
            name=status.name,
            max_num_batched_tokens=status.engine.max_num_batched_tokens if status.engine else None,
        )

    async def maybe_reading(self) -> Reading | None:
        """Return what `/metrics` says now; None when there are none."""
        try:
            async with self._open.get(self.url + "/metrics") as response:
                return read((await response.read()).decode(errors="replace")) if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def stream(self, model: str, prompt: Sequence[int], max_tokens: int) -> Timing:
        """Stream exactly `max_tokens` after `prompt`, and say when each came."""
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        data = msgspec.json.encode(body)  # before the clock starts
        timing = Timing(sent_s=time.perf_counter())
        try:
            async with self._open.post(
                self.url + "/v1/completions", data=data, headers={"content-type": "application/json"}
            ) as response:
                await self._check(response)
                if not response.content_type.startswith("text/event-stream"):
                    raise UnsupportedError(
                        f"{self.url} does not stream (it answered {response.content_type}), and without streams "
                        "nothing can be timed: probe the engine's own server."
                    )
                await _follow(response, timing, self.url)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._lost(error) from None
        if not timing.arrivals:
            raise UpstreamError(f"{self.url} ended a stream without a token.")
        return timing

    # ── inside ──

    @property
    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None, "used outside `async with`"
        return self._session

    async def _get(self, path: str) -> bytes:
        try:
            async with self._open.get(self.url + path) as response:
                await self._check(response)
                return await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._lost(error) from None

    async def _maybe_status(self) -> _Status:
        """Return what a Tollbridge worker says of itself; nothing of another server."""
        try:
            async with self._open.get(self.url + "/tollbridge/status") as response:
                return msgspec.json.decode(await response.read(), type=_Status) if response.status == 200 else _Status()
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, UnicodeDecodeError):
            return _Status()

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status == 200:
            return
        said = _message(await response.read())
        if response.status in (401, 403):
            raise AuthenticationError(
                f"{self.url} wants an API key ({response.status}): put it in the environment variable that "
                "--api-key-env names."
            )
        if response.status == 404:
            raise UnsupportedError(
                f"{self.url} has no {response.url.path}: it is no OpenAI-compatible server ({said})."
            )
        kind = RequestError if response.status < 500 and response.status != 429 else UnavailableError
        raise kind(f"{self.url} answered {response.status}: {said}")

    def _lost(self, error: Exception) -> Exception:
        if isinstance(error, (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError)):
            return RequestError(f"{self.url} is no URL: write it like http://127.0.0.1:8000.")
        if isinstance(error, aiohttp.ClientConnectorError):
            return UnavailableError(f"Nobody answers at {self.url}: start the server, or mend the address.")
        if isinstance(error, TimeoutError):
            return UpstreamError(f"{self.url} said nothing for {_SILENCE_S:g} s.")
        return UpstreamError(f"The answer from {self.url} broke off: {error or type(error).__name__}.")


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[msgspec.Raw] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


async def _follow(response: aiohttp.ClientResponse, timing: Timing, url: str) -> None:
    parser, counted = Parser(), 0
    async for chunk in response.content.iter_any():
        now_s = time.perf_counter()
        for data in _events(parser, chunk, url):
            if data == b"[DONE]":
                continue
            event = _event(data, url)
            usage = event.usage or _Usage()
            if usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens is not None:
                timing.cached_tokens = usage.prompt_tokens_details.cached_tokens
            told = usage.completion_tokens
            counted = counted + bool(event.choices) if told is None else told
            if counted > (timing.arrivals[-1][1] if timing.arrivals else 0):
                timing.arrivals.append((now_s, counted))


def _events(parser: Parser, chunk: bytes, url: str) -> Iterator[bytes]:
    try:
        yield from parser.feed(chunk)
    except ValueError as error:
        raise UpstreamError(f"{url} sent {error}.") from None


def _event(data: bytes, url: str) -> _Event:
    try:
        event = msgspec.json.decode(data, type=_Event)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise UpstreamError(f"{url} sent an event that is no answer: {_message(data)[:80]}") from None
    if bytes(event.error) != b"null":
        raise UpstreamError(f"The stream from {url} failed: {_message(data)}")
    return event


def _cards(body: bytes, url: str) -> list[dict[str, Any]]:
    try:
        cards = msgspec.json.decode(body)["data"]
        named = [card for card in cards if isinstance(card, dict) and "id" in card]
    except (msgspec.DecodeError, KeyError, TypeError):
        named = []
    if not named:
        raise UnsupportedError(f"{url} names no model at /v1/models: it is no OpenAI-compatible server.")
    return named


def _message(body: bytes) -> str:
    """Return what an error answer says, as one short clause."""
    try:
        found = msgspec.json.decode(body)
        inner = found.get("error", found)
        text = str(inner.get("message", "") if isinstance(inner, dict) else inner)
    except (msgspec.DecodeError, AttributeError):
        text = body.decode(errors="replace")
    return " ".join(text.split())[:300] or "nothing more"
