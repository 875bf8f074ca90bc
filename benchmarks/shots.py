"""Pictures for docs/img: `python benchmarks/shots.py FOLDER`: the dashboard in two sizes, light and dark; a plan.

A real stack under load: two embedded workers with a tiny model, short chats and long prompts, a link of 10 MB/s, and
SLOs as tight as such a model is quick. About a minute and a half on two idle cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
from PIL import Image
from playwright.async_api import async_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the file runs from anywhere, uninstalled

from benchmarks.support import browser
from tollbridge.bench.fleet import running
from tollbridge.engine.tiny import make_tiny_model
from tollbridge.plan.inputs import read_plan
from tollbridge.plan.page import page
from tollbridge.plan.plan import make_plan

SIZES = {"wide": (1440, 900), "narrow": (390, 844)}
SCHEMES = ("light", "dark")
PLAN = Path(__file__).parent / "plans" / "qwen2.5-7b-l40s.yaml"
WARM_S, LOAD_S = 12.0, 75.0
CHATS_PER_S, LONG_PER_S = 1.6, 0.7
COLOURS = 200  # of a picture that is to be small
WORKERS: list[dict[str, object]] = [
    {"name": "p0", "prefer": "prefill", "host": "node-a"},
    {"name": "d0", "prefer": "decode", "host": "node-b"},
]
ENGINE: dict[str, object] = {"max_num_batched_tokens": 2048, "kv_cache_mib": 8, "threads": 1}
MORE: dict[str, object] = {
    "router": {"port": 0, "policy": "adaptive", "explore": 0.1},
    "slo": {"ttft_s": 1.0, "tpot_s": 0.05, "itl_p99_s": 0.05},
    "transfer": {"bandwidth_cap": 10_000_000},
}


async def main(folder: Path) -> None:
    """Take all pictures."""
    with tempfile.TemporaryDirectory() as models:
        model = str(make_tiny_model(Path(models) / "tiny"))
        stack = running(model=model, workers=WORKERS, router_cores=None, engine=ENGINE, more=MORE)
        async with stack as fleet, async_playwright() as driver:
            path = browser.find(driver.chromium.executable_path)
            chromium = await driver.chromium.launch(executable_path=path, args=browser.arguments())
            load = asyncio.create_task(_load(fleet.url("router")))
            await asyncio.sleep(WARM_S)
            pages = {
                (size, scheme): await _open(chromium, fleet.url("router"), size, scheme)
                for size in SIZES
                for scheme in SCHEMES
            }
            await asyncio.sleep(LOAD_S - WARM_S)
            for (size, scheme), shown in pages.items():
                await shown.bring_to_front()
                await asyncio.sleep(1.5)
                _save(await shown.screenshot(full_page=True), folder / f"ui-{size}-{scheme}.png")
                if (size, scheme) == ("wide", "light"):
                    _save(await shown.screenshot(), folder / "ui.png")  # what is seen at first
            load.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await load
            await _plan(chromium, Path(models), folder)
            await chromium.close()


async def _open(chromium: Any, url: str, size: str, scheme: str) -> Any:
    width, height = SIZES[size]
    context = await chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    shown = await context.new_page()
    await shown.goto(f"{url}/ui/")
    return shown


async def _plan(chromium: Any, made: Path, folder: Path) -> None:
    """Take the page of `tollbridge plan` for one of the published attempts."""
    (made / "plan.html").write_text(page(make_plan(read_plan(PLAN))))
    context = await chromium.new_context(viewport={"width": 1100, "height": 860})
    shown = await context.new_page()
    await shown.goto((made / "plan.html").as_uri())
    _save(await shown.screenshot(), folder / "plan.png")


async def _load(url: str) -> None:
    """Send chats and long prompts at random, for ever; some ask for a path."""
    rng = random.Random(7)
    system = [rng.randrange(20, 200) for _ in range(64)]
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        while True:
            is_long = rng.random() < LONG_PER_S / (CHATS_PER_S + LONG_PER_S)
            num_tokens = rng.choice((700, 1000, 1400)) if is_long else rng.choice((16, 40, 90))
            prompt = system + [rng.randrange(20, 200) for _ in range(num_tokens)]
            policy = rng.choice(("split", "local")) if rng.random() < 0.08 else None
            group.create_task(_ask(session, url, prompt, 60 if is_long else rng.choice((200, 300)), policy))
            await asyncio.sleep(rng.expovariate(CHATS_PER_S + LONG_PER_S))


async def _ask(
    session: aiohttp.ClientSession, url: str, prompt: list[int], max_tokens: int, policy: str | None
) -> None:
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    headers = {"x-tollbridge-policy": policy} if policy else {}
    with contextlib.suppress(aiohttp.ClientError):
        async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
            await response.read()


def _save(png: bytes, path: Path) -> None:
    """Write the picture with a palette, which is a third of its size."""
    image = Image.open(io.BytesIO(png)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    image.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/img")
    target.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(target))
