"""Does the router's memory stay where it is over many requests? Whole answers and streams in turn, 16 at once."""

from __future__ import annotations

import asyncio

from benchmarks.support.result import ClaimResult
from benchmarks.support.soak import CONNECTIONS, soak

DESCRIPTION = "the router's resident memory over 100,000 requests"

MAX_GROWTH = 0.05  # of resident memory, over the second half


def run(quick: bool) -> ClaimResult:
    """Measure, and return the claim's verdict."""
    figures = asyncio.run(soak(10_000 if quick else 100_000))
    return ClaimResult(
        holds=figures["rss_growth"] <= MAX_GROWTH and not figures["errors"],
        figures=dict(figures),
        bounds={"rss_growth": f"<= {MAX_GROWTH:g}", "errors": "0"},
        conditions={"connections": CONNECTIONS, "upstreams": 2, "events": 16, "policy": "local"},
    )
