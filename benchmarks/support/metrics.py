"""Read a worker's `/metrics`, before and after on the same process."""

from __future__ import annotations

import aiohttp
from prometheus_client.parser import text_string_to_metric_families


async def scrape(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Return each sample's value by name, summed over labels."""
    values: dict[str, float] = {}
    async with session.get(url + "/metrics") as response:
        text = await response.text()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values
