"""From a configuration to a running stack: the model is here, the cores exist, everybody is ready."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from tollbridge.cli.display import Display
from tollbridge.cli.interrupts import Interrupts
from tollbridge.cli.placement import place
from tollbridge.cli.prepare import prepare_model
from tollbridge.cli.stack import Stack, running_stack
from tollbridge.config.cluster import ClusterConfig
from tollbridge.worker.supervisor import OnLine


@asynccontextmanager
async def launched(
    cluster: ClusterConfig, secret: bytes, display: Display, interrupts: Interrupts, *, on_line: OnLine | None = None
) -> AsyncIterator[Stack]:
    """Run `cluster` for as long as the block lasts. An interrupt stops it; a second one kills it."""
    placement = place(cluster, os.sched_getaffinity(0))
    if placement.note:
        display.note(placement.note)
    model = await prepare_model(cluster.model, display)
    cluster = msgspec.structs.replace(placement.cluster, model=model)

    def made(stack: Stack) -> None:
        interrupts.on_second = stack.kill

    async with running_stack(cluster, secret, display=display, on_line=on_line, on_made=made) as stack:
        yield stack
