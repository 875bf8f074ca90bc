"""Arms that the bench starts itself: embedded workers and a router over them, on this machine."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from tollbridge.bench.compare import AGAIN
from tollbridge.bench.fleet import Fleet, running
from tollbridge.bench.netns import Link
from tollbridge.bench.records import Arm
from tollbridge.bench.vllm_worker import Vllm, vllm_worker

ONE, BOTH, SPLIT = "one", "both", "split"
_TITLES = {
    ONE: "one worker does both",
    ONE + AGAIN: "one worker, again (A/A)",
    BOTH: "two workers, each does both",
    SPLIT: "split over two workers",
}
_PREFERENCE = {"p": "prefill", "d": "decode"}


@dataclass(frozen=True, kw_only=True)
class Local:
    """A fleet to start: workers are named p0, d0, ... after what they are to do."""

    model: str = "smollm2"
    names: Sequence[str] = ("p0", "d0")
    engine: Mapping[str, object] = field(default_factory=lambda: {"kv_cache_mib": 512, "threads": 1})
    more: Mapping[str, object] = field(default_factory=dict)
    hosts: Mapping[str, str] = field(default_factory=dict)  # address of a worker, by name
    vllm: Vllm | None = None  # what the workers are; None: embedded
    prefixes: Mapping[str, Sequence[str]] = field(default_factory=dict)  # before a worker's command


@dataclass
class Started:
    """What was started here: the arms, and the workers' processes and names by URL."""

    arms: list[Arm] = field(default_factory=list)
    pids: dict[str, int] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    link: Link | None = None  # between the workers' hosts, where it can be shaped

    def add(self, fleet: Fleet, arms: Sequence[Arm], *, name: str = "", title: str = "") -> None:
        """Take a fleet's arms, the single one of them by `name` where one is given."""
        self.arms += [msgspec.structs.replace(arm, name=name, title=title) for arm in arms] if name else arms
        self.pids |= {ready.url: ready.pid for ready in fleet.ready.values()}
        self.names |= {ready.url: f"{name}{' ' if name else ''}{worker}" for worker, ready in fleet.ready.items()}


@asynccontextmanager
async def start(given: Local, names: Sequence[str]) -> AsyncIterator[Started]:
    """Start one fleet and return its arms called `names`."""
    async with started(given) as fleet:
        found = Started()
        found.add(fleet, arms_of(fleet, names))
        yield found


@asynccontextmanager
async def started(local: Local) -> AsyncIterator[Fleet]:
    """Run the fleet, each worker without a GPU on a core of its own while they last; nothing is left at the end."""
    cores = sorted(os.sched_getaffinity(0))
    pinned = len(cores) >= len(local.names) and (local.vllm is None or local.vllm.on_cpu)
    workers = [
        _worker(name, local.hosts.get(name), cores[at] if pinned else None) for at, name in enumerate(local.names)
    ]
    if local.vllm is not None:
        workers = [
            vllm_worker(worker, local.model, local.vllm, local.engine, local.hosts.get(name))
            for name, worker in zip(local.names, workers, strict=True)
        ]
    async with running(
        model=local.model,
        workers=workers,
        router_cores=None,
        engine=dict(local.engine),
        more=local.more,
        prefixes=local.prefixes,
    ) as fleet:
        yield fleet


def _worker(name: str, address: str | None, core: int | None) -> dict[str, object]:
    worker: dict[str, object] = {"name": name, "prefer": _PREFERENCE.get(name[0], "any"), "host": "node-a"}
    if core is not None:
        worker["cores"] = [core]
    if address is not None:
        worker |= {"host": address, "url": f"http://{address}:0", "kv": f"{address}:0", "events": f"tcp://{address}:0"}
    return worker


def arms_of(fleet: Fleet, names: Sequence[str], *, decode: str = "d0") -> list[Arm]:
    """Return the arms by name: `one` and its A/A pair go straight to a worker, all others by the router.

    `both` is the policy local; any other name is a policy of the router.
    """
    return [_arm(fleet, name, decode) for name in names]


def _arm(fleet: Fleet, name: str, decode: str) -> Arm:
    title = _TITLES.get(name, f"policy {name}")
    if name.removesuffix(AGAIN) == ONE:
        return Arm(name=name, title=title, url=fleet.url(decode), workers=[fleet.url(decode)])
    return Arm(
        name=name,
        title=title,
        url=fleet.url("router"),
        policy="local" if name == BOTH else name,
        workers=[fleet.url(worker) for worker in fleet.workers],
        num_workers=len(fleet.workers),
    )
