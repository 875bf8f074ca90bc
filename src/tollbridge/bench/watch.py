"""What the servers say of themselves around a window: their metrics, their memory, the energy of the GPUs.

A worker whose process is on this machine is watched by its pid, children included; another one by the
`process_resident_memory_bytes` of its metrics. Energy is the integral of what nvidia-smi says the GPUs of this machine
draw; where there is none it is unknown, not zero.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import aiohttp
import psutil

from tollbridge.bench.client import now

Counters = dict[str, float]
_RESIDENT = "process_resident_memory_bytes"
_TIMEOUT = aiohttp.ClientTimeout(total=5)
MEMORY_EVERY_S = 0.25
_POWER_EVERY_S = 1.0


def parse(text: str) -> Counters:
    """Return each sample's value by name, summed over labels, of an exposition in Prometheus' text format."""
    values: Counters = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        head, brace, tail = line.rpartition("}")
        name = head.partition("{")[0] if brace else line.split()[0]
        with contextlib.suppress(IndexError, ValueError):  # no sample of a format that we know
            values[name] = values.get(name, 0.0) + float((tail if brace else line.partition(" ")[2]).split()[0])
    return values


def growth(before: Counters, after: Counters) -> Counters:
    """Return by how much counters grew; names of histogram buckets are left out, they are many."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items() if not name.endswith("_bucket")}
    return {name: value for name, value in grown.items() if value and name.endswith(("_total", "_sum", "_count"))}


def energy_j(readings: Sequence[tuple[float, float]], begun_s: float, ended_s: float) -> float | None:
    """Return the integral of (seconds, watts) over a window, before the first and after the last as they were.

    None for fewer than two readings: a reading of nvidia-smi is itself the mean of about a second.
    """
    if len(readings) < 2:
        return None
    (first_s, first_w), (last_s, last_w) = readings[0], readings[-1]
    between_j = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(readings))
    return between_j + max(0.0, first_s - begun_s) * first_w + max(0.0, ended_s - last_s) * last_w


class Watch:
    """Looks at workers; `urls` and `pids` by worker."""

    def __init__(self, session: aiohttp.ClientSession, pids: Mapping[str, int]) -> None:
        self._session, self._pids = session, pids
        self._before: dict[str, Counters] = {}
        self._memory: dict[str, list[tuple[float, float]]] = {}
        self._power: list[tuple[float, float]] = []
        self._begun_s = self._ended_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self, urls: Sequence[str], *, memory: bool) -> None:
        self._memory, self._power = {}, []
        self._before = {url: await self.scrape(url) for url in urls}
        self._begun_s = now()
        self._tasks = [asyncio.create_task(self._watch_power())]
        if memory:
            self._tasks.append(asyncio.create_task(self._watch_memory(urls, now())))

    async def end(
        self, names: Mapping[str, str]
    ) -> tuple[dict[str, Counters], dict[str, list[tuple[float, float]]], float | None]:
        """Return (counters' growth, memory, joules) since `begin`, workers by the names that `names` has for URLs."""
        await self.stop()
        grown = {names.get(url, url): growth(before, await self.scrape(url)) for url, before in self._before.items()}
        memory = {names.get(url, url): seen for url, seen in self._memory.items()}
        return grown, memory, energy_j(self._power, self._begun_s, self._ended_s)

    async def stop(self) -> None:
        if self._tasks:
            self._ended_s = now()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def scrape(self, url: str) -> Counters:
        """Return what a worker's /metrics say; nothing when it has none."""
        try:
            async with self._session.get(url + "/metrics", timeout=_TIMEOUT) as response:
                return parse(await response.text()) if response.status == 200 else {}
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError):
            return {}

    async def _watch_memory(self, urls: Sequence[str], start_s: float) -> None:
        while True:
            for url in urls:
                size = await self._resident(url)
                if size:
                    self._memory.setdefault(url, []).append((round(now() - start_s, 2), size))
            await asyncio.sleep(MEMORY_EVERY_S)

    async def _resident(self, url: str) -> float:
        pid = self._pids.get(url)
        if pid is None:
            return (await self.scrape(url)).get(_RESIDENT, 0.0)
        return await asyncio.to_thread(resident_bytes, pid)  # the kernel walks the page tables: some milliseconds

    async def _watch_power(self) -> None:
        program = shutil.which("nvidia-smi")
        while program is not None:
            process = await asyncio.create_subprocess_exec(
                program, "--query-gpu=power.draw", "--format=csv,noheader,nounits",
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            out, _ = await process.communicate()
            with contextlib.suppress(ValueError):
                self._power.append((now(), sum(float(line) for line in out.decode().split())))
            await asyncio.sleep(_POWER_EVERY_S)


def resident_bytes(pid: int) -> float:
    """Return the memory of a process and its children, pages that they share counted once; 0 when it is gone."""
    try:
        root = psutil.Process(pid)
        return float(sum(_proportional_bytes(process.pid) for process in [root, *root.children(recursive=True)]))
    except (psutil.Error, OSError):
        return 0.0


def _proportional_bytes(pid: int) -> int:
    """Return the PSS of a process (proc(5), smaps_rollup): a page that n processes map counts as an n-th."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0
