"""A chat client for a Tollbridge router: streams the answer, then asks for the decision and what happened."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from tollbridge.errors import RequestError, TollbridgeError, UnavailableError, UpstreamError
from tollbridge.wire.decision import DecisionRecord
from tollbridge.wire.openai import ErrorBody
from tollbridge.wire.sse import Parser

_CONNECT_S = 10.0
_SILENCE_S = 600.0  # the router has deadlines of its own, and tells us
_RECORD_S = 5.0  # the record is complete a moment after the last byte

Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One finished answer as the client saw it, and the router's record of it."""

    text: str
    ttft_s: float
    total_s: float
    record: DecisionRecord | None


class RouterClient:
    """Talks to one router. Use it as an async context manager."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> RouterClient:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
        self._session = aiohttp.ClientSession(timeout=timeout, headers=self._headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        policy: str | None = None,
        max_tokens: int | None = None,
        on_text: Callable[[str], None] = lambda text: None,
        **sampling: object,
    ) -> Answer:
        """Stream one answer, each piece to `on_text`; RequestError or UnavailableError says why there is none."""
        request_id = uuid.uuid4().hex
        headers = {"x-request-id": request_id} | ({"x-tollbridge-policy": policy} if policy else {})
        body = {"messages": list(messages), "stream": True, **sampling}
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        pieces: list[str] = []
        begun_s = time.perf_counter()
        first_s: float | None = None
        async for text in self._stream("/v1/chat/completions", body, headers):
            first_s = time.perf_counter() if first_s is None else first_s
            pieces.append(text)
            on_text(text)
        ended_s = time.perf_counter()
        return Answer(
            text="".join(pieces),
            ttft_s=(ended_s if first_s is None else first_s) - begun_s,
            total_s=ended_s - begun_s,
            record=await self.maybe_record(request_id),
        )

    async def maybe_record(self, request_id: str) -> DecisionRecord | None:
        """Return the record of a request once it is complete; None from a server that keeps none."""
        record: DecisionRecord | None = None
        deadline_s = time.monotonic() + _RECORD_S
        while time.monotonic() < deadline_s:
            try:
                async with self._open.get(f"{self.url}/decisions/{request_id}") as response:
                    if response.status != 200:
                        return None
                    record = msgspec.json.decode(await response.read(), type=DecisionRecord)
            except (aiohttp.ClientError, msgspec.DecodeError):
                return record
            if record.happened.status != "running":
                return record
            await asyncio.sleep(0.02)
        return record

    @property
    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None, "used outside `async with`"
        return self._session

    async def _stream(self, path: str, body: Mapping[str, object], headers: Mapping[str, str]) -> AsyncIterator[str]:
        try:
            async with self._open.post(self.url + path, json=body, headers=headers) as response:
                if response.status != 200:
                    raise _refusal(response.status, await response.read())
                parser = Parser()
                async for chunk in response.content.iter_any():
                    for data in parser.feed(chunk):
                        if text := _text_of(data):
                            yield text
        except aiohttp.ClientConnectorError:
            raise UnavailableError(f"nobody answers at {self.url}: start a router with `tollbridge up`.") from None
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
            raise RequestError(f"{self.url} is no URL: write it like http://127.0.0.1:8000.") from None
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UpstreamError(f"the answer from {self.url} broke off: {error or type(error).__name__}.") from None


def _text_of(data: bytes) -> str:
    """Return the text that one SSE event adds; UpstreamError when the event reports a failure."""
    if data == b"[DONE]":
        return ""
    event: dict[str, Any] = msgspec.json.decode(data)
    if "error" in event:
        raise UpstreamError(f"the answer broke off: {_message(data)}")
    return "".join(choice.get("delta", {}).get("content") or "" for choice in event.get("choices", ()))


def _refusal(status: int, body: bytes) -> TollbridgeError:
    kind = RequestError if 400 <= status < 500 and status != 429 else UnavailableError
    return kind(f"the router answered {status}: {_message(body)}")


def _message(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=ErrorBody).error.message
    except msgspec.DecodeError:
        return body[:200].decode(errors="replace").strip() or "(nothing more)"
