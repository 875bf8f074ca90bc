"""Does the router's memory stay where it is over many requests?"""

from __future__ import annotations

import contextlib

import psutil

from benchmarks.support.bare import BODY, STREAM_BODY, router_over, trivial
from benchmarks.support.hammer import hammer

CONNECTIONS = 16
SAMPLES = 20


async def soak(num_requests: int) -> dict[str, float]:
    """Return the resident memory after half of the requests, after all, and its growth between, as a fraction."""
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(trivial()) for _ in range(2)]
        url, pid = await stack.enter_async_context(router_over(urls))
        router, sizes, errors = psutil.Process(pid), [], 0
        for at in range(SAMPLES):
            body = STREAM_BODY if at % 2 else BODY
            blows = await hammer(url, body, connections=CONNECTIONS, requests=num_requests // SAMPLES)
            errors += blows.errors
            sizes.append(router.memory_info().rss)
    half = sizes[SAMPLES // 2]
    return {
        "requests": float(num_requests),
        "errors": float(errors),
        "rss_half_mib": half / 2**20,
        "rss_end_mib": sizes[-1] / 2**20,
        "rss_growth": sizes[-1] / half - 1,
    }
