"""One window by several client processes, when one of them would lag.

    python -m tollbridge.bench.shard        # a Task on stdin, a Done on stdout

All processes of a machine read the same monotonic clock, so they begin together.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import msgspec
import uvloop

from tollbridge.bench.client import Client, Target, now
from tollbridge.bench.load import STEADY, Load, Shape
from tollbridge.bench.records import Planned, Sample
from tollbridge.errors import TollbridgeError, UpstreamError

_HEAD_START_S = 2.0  # for interpreters to start
ONE_CLIENT_PER_S = 1000.0  # requests that one process sends without lagging, half of what it was measured at
ONE_CLIENT_TOKENS_PER_S = 10_000.0
STEADY_TOKENS_PER_S = 200.0  # of a stream


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A share of a window."""

    url: str
    path: str
    headers: dict[str, str]
    template: dict[str, object]
    cell: str
    block: int
    arm: str
    duration_s: float
    concurrency: int | None
    drain_s: float
    stall_s: float
    start_s: float
    planned: list[tuple[int, Planned]]


class Done(msgspec.Struct, frozen=True, kw_only=True):
    samples: list[Sample] = []
    took_s: float = 0.0
    error: str = ""


def processes_for(planned: Sequence[Planned], duration_s: float) -> int:
    """Return how many client processes keep up with `planned` in an open loop.

    Steady streams are taken at `STEADY_TOKENS_PER_S`: they are cut off long before their `max_tokens`.
    """
    if not planned or not duration_s:
        return 1
    arriving = [one for one in planned if one.group != STEADY]
    requests_per_s = len(arriving) / duration_s
    tokens_per_s = sum(one.max_tokens for one in arriving) / duration_s
    tokens_per_s += STEADY_TOKENS_PER_S * (len(planned) - len(arriving))
    return max(1, round(max(requests_per_s / ONE_CLIENT_PER_S, tokens_per_s / ONE_CLIENT_TOKENS_PER_S) + 0.49))


def split(task: Task, num_processes: int) -> list[Task]:
    """Return the shares: every n-th request; lanes of a closed loop are divided as evenly as they can be."""
    shares = []
    for at in range(num_processes):
        lanes = task.concurrency
        if lanes is not None:
            lanes = lanes // num_processes + (at < lanes % num_processes)
            if not lanes:
                continue
        shares.append(msgspec.structs.replace(task, planned=task.planned[at::num_processes], concurrency=lanes))
    return shares


async def run_sharded(task: Task, num_processes: int) -> tuple[list[Sample], float]:
    """Run `task` by `num_processes` processes; UpstreamError when one fails."""
    start_s = now() + _HEAD_START_S
    shares = split(msgspec.structs.replace(task, start_s=start_s), num_processes)
    done = await asyncio.gather(*map(_in_child, shares))
    failed = next((each.error for each in done if each.error), None)
    if failed is not None:
        raise UpstreamError(failed)
    samples = sorted((sample for each in done for sample in each.samples), key=lambda sample: sample.index)
    return samples, max(each.took_s for each in done)


async def _in_child(task: Task) -> Done:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tollbridge.bench.shard", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        out, _ = await process.communicate(msgspec.json.encode(task))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        return Done(error=f"A client process ended with exit code {process.returncode}.")
    return msgspec.json.decode(out, type=Done)


async def run_here(task: Task) -> tuple[list[Sample], float]:
    """Run `task` by this process."""
    shape = Shape(
        cell=task.cell, block=task.block, arm=task.arm, duration_s=task.duration_s, concurrency=task.concurrency,
        drain_s=task.drain_s,
    )  # fmt: skip
    async with Client(stall_s=task.stall_s) as client:
        load = Load(client, Target.at(task.url, task.path, task.headers), task.template)
        return await load.run(shape, task.planned, task.start_s or None)


def main() -> int:
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            samples, took_s = runner.run(run_here(task))
        done = Done(samples=samples, took_s=took_s)
    except TollbridgeError as error:
        done = Done(error=error.message)
    sys.stdout.buffer.write(msgspec.json.encode(done))
    return 0


if __name__ == "__main__":
    sys.exit(main())
