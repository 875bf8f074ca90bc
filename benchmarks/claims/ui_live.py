"""Does the dashboard tell the truth, at once, and for nothing? Real stack, real browser, a router at 500 requests/s.

Three scenes:

    truth     two embedded workers (tiny model), requests both ways; every figure that the page shows is compared with
              /metrics, each row with its decision; then a worker is killed and the page is watched until it says so
    overhead  a router over a trivial upstream at 500 requests/s; spells with one viewer and without take turns; the CPU
              time of the router per request, paired within a repetition, median over them
    page      the same router, watched by the browser: pictures drawn a second, and the longest time that it did nothing
              else
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil
import uvloop

from benchmarks.support import browser
from benchmarks.support.bare import BODY, router_over, trivial
from benchmarks.support.pace import Answers, pace
from benchmarks.support.result import ClaimResult, Table, unavailable
from tollbridge.bench.fleet import Fleet, running
from tollbridge.engine.tiny import make_tiny_model
from tollbridge.ui.pages import pages

DESCRIPTION = "the dashboard: its figures, how soon it tells of a dead worker, what it costs the router"

RATE_PER_S = 500.0
TOLD_S, OVERHEAD, PAGE_BYTES, PICTURES_PER_S, TASK_S = 3.0, 0.02, 300_000, 1.5, 0.2
WORKERS: list[dict[str, object]] = [{"name": "p0", "prefer": "prefill"}, {"name": "d0", "prefer": "decode"}]
ENGINE: dict[str, object] = {"max_num_batched_tokens": 128, "kv_cache_mib": 64, "threads": 1}


@dataclass(frozen=True)
class Size:
    requests: int  # of each kind, in the first scene
    repetitions: int
    spell_s: float


def run(quick: bool) -> ClaimResult:
    """Measure, and return the claim's verdict."""
    size = Size(8, 6, 4.0) if quick else Size(30, 12, 8.0)
    try:
        from playwright.async_api import async_playwright
    except ImportError:
        return unavailable("Playwright is not installed: pip install -e '.[dev]'.")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure(size, async_playwright))


async def _measure(size: Size, playwright: Callable[[], Any]) -> ClaimResult:
    async with playwright() as driver:
        path = browser.find(driver.chromium.executable_path)
        if path is None:
            return unavailable(f"There is no Chromium: apt-get install chromium, or name one with {browser.VARIABLE}.")
        chromium = await driver.chromium.launch(executable_path=path, args=browser.arguments())
        truth = await _truth(chromium, size)
        async with trivial() as upstream, router_over([upstream], policy="local") as (url, pid):
            await pace(url, BODY, per_s=RATE_PER_S, seconds=2.0)  # warm
            overhead = await _overhead(url, pid, size)
            page = await _page(chromium, url, size)
        await chromium.close()
    return _verdict(truth, overhead, page, size)


# --- truth


async def _truth(chromium: Any, size: Size) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_tiny_model(Path(folder) / "tiny"))
        router = {"router": {"port": 0, "policy": "adaptive"}}
        stack = running(model=model, workers=WORKERS, router_cores=None, engine=ENGINE, more=router)
        async with stack as fleet, aiohttp.ClientSession() as session, _watched(chromium, fleet.url("router")) as page:
            for number in range(size.requests):
                await _ask(session, fleet.url("router"), "split", [number + 5] * 180)
                await _ask(session, fleet.url("router"), "local", [number + 60] * 40)
            await asyncio.sleep(2.0)  # the workers are asked once a second
            wrong = await _compare(page.page, session, fleet.url("router"))
            alike, rows = await _told_apart(page.page)
            told_s = await _kill(page.page, fleet)
            return {
                "figures_wrong": len(wrong), "figures_compared": NUM_FIGURES, "wrong": wrong, "rows": rows,
                "rows_not_told_apart": alike, "dead_worker_told_s": told_s, "complaints": len(page.complaints),
            }  # fmt: skip


class _Watched:
    def __init__(self, page: Any) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _note(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


@contextlib.asynccontextmanager
async def _watched(chromium: Any, url: str) -> AsyncIterator[_Watched]:
    context = await chromium.new_context(viewport={"width": 1440, "height": 900})
    page = _Watched(await context.new_page())
    await page.page.goto(f"{url}/ui/")
    await page.page.wait_for_selector("#live[data-state=live]")
    yield page
    await context.close()


async def _ask(session: aiohttp.ClientSession, url: str, policy: str, prompt: list[int]) -> None:
    body = {"prompt": prompt, "max_tokens": 16, "stream": True, "ignore_eos": True}
    async with session.post(f"{url}/v1/completions", json=body, headers={"x-tollbridge-policy": policy}) as response:
        await response.read()


NUM_FIGURES = 8


async def _compare(page: Any, session: aiohttp.ClientSession, url: str) -> list[str]:
    """Return what the page says otherwise than /metrics."""
    async with session.get(f"{url}/metrics") as response:
        metrics = _totals(await response.text())
    text = {name: await page.inner_text(f"#{name}") for name in ("because", "tiles", "transfers", "memory")}
    total, split = metrics["requests"], metrics["split"]
    cached = metrics["cached_prompt_tokens_real"] / metrics["cacheable_prompt_tokens"]
    wanted = [
        ("because", f"{split:,.0f} of {total:,.0f} requests were split"),
        ("because", f"for {_seconds(metrics['toll_seconds'])} of toll"),
        ("tiles", f"{100 * split / total:.0f} %"),
        ("tiles", f"{metrics['split_verified']:.0f} verified"),
        ("tiles", f"{100 * cached:.0f} %"),
        ("transfers", f"{metrics['split_verified']:.0f} of {split:.0f}"),
        ("transfers", _bytes(metrics["kv_payload_bytes"])),
        ("memory", f"{100 * cached:.0f} %"),
    ]
    assert len(wanted) == NUM_FIGURES
    return [f"{place} lacks {words!r}" for place, words in wanted if words not in text[place]]


def _totals(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, labels, value in re.findall(r"^tollbridge_router_(\w+)_total(\{[^}]*\})? (\S+)$", text, re.M):
        found[name] = found.get(name, 0.0) + float(value)
        if name == "requests" and 'choice="split"' in labels:
            found["split"] = found.get("split", 0.0) + float(value)
    return found


def _seconds(value: float) -> str:
    if value < 0.9995:
        return f"{value * 1e3:.0f} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def _bytes(value: float) -> str:
    unit = 0
    while value >= 999.5:
        value, unit = value / 1000, unit + 1
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits if unit else 0}f} {('B', 'kB', 'MB', 'GB')[unit]}"


async def _told_apart(page: Any) -> tuple[int, int]:
    """Return how many rows do not show their choice by word, shape and colour, and how many there are."""
    rows = await page.evaluate(
        """() => [...document.querySelectorAll('.decisions li')].map(li => {
            const mark = getComputedStyle(li.querySelector('.mark'));
            return [li.querySelector('b').textContent, li.querySelector('.path').textContent.includes('→'),
                    mark.borderRadius, mark.backgroundColor];
        })"""
    )
    looks = {word: {(radius, colour) for w, _, radius, colour in rows if w == word} for word in ("split", "local")}
    clear = all(len(each) == 1 for each in looks.values()) and not set.intersection(*map(_parts, looks.values()))
    return sum(not clear or (word == "split") != arrow for word, arrow, _, _ in rows), len(rows)


def _parts(looks: set[tuple[str, str]]) -> set[str]:
    return {part for look in looks for part in look}


async def _kill(page: Any, fleet: Fleet) -> float:
    """Kill the prefill worker; return the seconds until the page says that everything runs local."""
    os.kill(fleet.ready["p0"].pid, signal.SIGKILL)
    begun_s = time.monotonic()
    await page.wait_for_selector(".alerts li[data-code=no_ready_prefill]", timeout=20_000)
    return time.monotonic() - begun_s


# --- overhead


@dataclass(frozen=True)
class Spell:
    cpu_s: float  # of the router, per request
    answers: Answers


async def _overhead(url: str, pid: int, size: Size) -> list[tuple[Spell, Spell]]:
    """Return (nobody looks, one looks) of each repetition; which comes first takes turns."""
    found = []
    for repetition in range(size.repetitions):
        first = bool(repetition % 2)
        one, other = await _spell(url, pid, size, looks=first), await _spell(url, pid, size, looks=not first)
        found.append((other, one) if first else (one, other))
    return found


async def _spell(url: str, pid: int, size: Size, *, looks: bool) -> Spell:
    viewer = asyncio.create_task(_look(url)) if looks else None
    await asyncio.sleep(0.2)
    before = _cpu_s(pid)
    answers = await pace(url, BODY, per_s=RATE_PER_S, seconds=size.spell_s)
    cpu_s = _cpu_s(pid) - before
    if viewer is not None:
        assert not viewer.done(), "the viewer was let go"
        viewer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await viewer
    return Spell(cpu_s / max(1, len(answers.latencies_s)), answers)


async def _look(url: str) -> None:
    async with aiohttp.ClientSession(read_bufsize=1 << 22) as session, session.get(f"{url}/ui/events") as response:
        async for _ in response.content.iter_any():
            pass


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


# --- page


async def _page(chromium: Any, url: str, size: Size) -> dict[str, float]:
    async with _watched(chromium, url) as page:
        load = asyncio.create_task(pace(url, BODY, per_s=RATE_PER_S, seconds=size.spell_s + 2.0))
        await asyncio.sleep(1.0)
        pictures, task_s = await page.page.evaluate(
            """(ms) => new Promise((done) => {
                let pictures = 0, longest = 0;
                const counted = document.querySelector('#because');
                new MutationObserver(() => { pictures += 1; }).observe(counted, {childList: true});
                new PerformanceObserver((list) => {
                    for (const each of list.getEntries()) longest = Math.max(longest, each.duration);
                }).observe({type: 'longtask'});
                setTimeout(() => done([pictures, longest / 1000]), ms);
            })""",
            size.spell_s * 1000,
        )
        answers = await load
        return {"pictures_per_s": pictures / size.spell_s, "longest_task_s": task_s, "errors": float(answers.errors)}


# --- verdict


def _verdict(
    truth: dict[str, object], overhead: list[tuple[Spell, Spell]], page: dict[str, float], size: Size
) -> ClaimResult:
    extra = [looked.cpu_s / alone.cpu_s - 1.0 for alone, looked in overhead]
    num_bytes = sum(len(each.body) for name, each in pages().items() if name)
    figures: dict[str, object] = {
        **{name: value for name, value in truth.items() if name != "wrong"},
        "overhead": median(extra),
        "overhead_least": min(extra),
        "overhead_most": max(extra),
        "cpu_s_per_request": median(alone.cpu_s for alone, _ in overhead),
        "p50_alone_s": median(alone.answers.percentile_s(50) for alone, _ in overhead),
        "p50_looked_s": median(looked.answers.percentile_s(50) for _, looked in overhead),
        "p99_alone_s": median(alone.answers.percentile_s(99) for alone, _ in overhead),
        "p99_looked_s": median(looked.answers.percentile_s(99) for _, looked in overhead),
        "per_s": median(len(looked.answers.latencies_s) / size.spell_s for _, looked in overhead),
        "pictures_per_s": page["pictures_per_s"],
        "longest_task_s": page["longest_task_s"],
        "page_bytes": num_bytes,
    }
    bounds: dict[str, tuple[float, bool]] = {
        "figures_wrong": (0, False), "rows_not_told_apart": (0, False), "complaints": (0, False),
        "dead_worker_told_s": (TOLD_S, False), "overhead": (OVERHEAD, False), "page_bytes": (PAGE_BYTES, False),
        "longest_task_s": (TASK_S, False), "pictures_per_s": (PICTURES_PER_S, True),
    }  # fmt: skip
    kept = {name: (value >= bound) if least else (value <= bound)  # type: ignore[operator]
            for name, (bound, least) in bounds.items() for value in [figures[name]]}  # fmt: skip
    rows = [
        [
            name,
            _text(figures[name]),
            f"{'>=' if bounds[name][1] else '<='} {bounds[name][0]:g}" if name in bounds else "-",
        ]
        for name in figures
    ]
    return ClaimResult(
        holds=all(kept.values()),
        figures=figures,
        bounds={name: f"{'>=' if least else '<='} {bound:g}" for name, (bound, least) in bounds.items()},
        conditions={
            "rate_per_s": RATE_PER_S,
            "repetitions": size.repetitions,
            "spell_s": size.spell_s,
            "wrong": truth["wrong"],
        },
        table=Table(title="ui-live", columns=["figure", "measured", "must be"], rows=rows),
    )


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
