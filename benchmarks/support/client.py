"""A small measuring client: streams with the arrival time of every token.

TTFT is first token minus request sent; a gap is the time between two consecutive tokens (ITL), pooled over requests.
A chunk that carries several tokens counts as one arrival: its other tokens have gap 0, and are counted as `merged`.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import dataclass, field

import aiohttp

from tollbridge.wire import sse

WARM_TOKENS = 8  # a stream that has so many is past its start


@dataclass
class Stream:
    """One request as the client saw it. Times are monotonic seconds."""

    sent_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    merged: int = 0
    decision: dict[str, object] = field(default_factory=dict)
    error: str = ""
    warm: asyncio.Event = field(default_factory=asyncio.Event)  # WARM_TOKENS have come, or it has ended

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.sent_s

    @property
    def itl_p99_s(self) -> float:
        """The gap that 99 % of this stream's are at most; 0 without any."""
        gaps_s = sorted(self.gaps_s())
        return gaps_s[math.ceil(0.99 * len(gaps_s)) - 1] if gaps_s else 0.0

    def gaps_s(self, since_s: float = 0.0, until_s: float = float("inf")) -> list[float]:
        """Gaps that ended within the window."""
        pairs = zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        return [b - a for a, b in pairs if since_s <= b < until_s]


async def stream(
    session: aiohttp.ClientSession, url: str, body: dict[str, object], *, policy: str | None = None,
    into: Stream | None = None,
    headers: dict[str, str] | None = None,
) -> Stream:  # fmt: skip
    """Send one streaming completion and record each token's arrival; errors end up in `error`."""
    result = into or Stream()
    all_headers = {**({"x-tollbridge-policy": policy} if policy else {}), **(headers or {})}
    result.sent_s = time.monotonic()
    try:
        async with session.post(
            url + "/v1/completions", json={**body, "stream": True}, headers=all_headers
        ) as response:
            result.decision = json.loads(response.headers.get("x-tollbridge-decision", "{}"))
            if response.status != 200:
                result.error = (await response.text())[:300]
                return result
            parser = sse.Parser()
            async for chunk in response.content.iter_any():
                now = time.monotonic()
                for data in parser.feed(chunk):
                    _note(result, data, now)
    finally:
        result.warm.set()
    return result


def _note(result: Stream, data: bytes, now_s: float) -> None:
    if data == b"[DONE]":
        return
    event = json.loads(data)
    if "error" in event:
        result.error = event["error"]["message"]
        return
    tokens = sum(len(choice.get("token_ids") or ()) for choice in event.get("choices", ()))
    if tokens:
        result.merged += tokens - 1
        result.arrivals_s.append(now_s)
        if len(result.arrivals_s) == WARM_TOKENS:
            result.warm.set()
