"""The model of a cluster that is about to start: fetch or make it when it is missing.

That takes torch, so a child process does it: `up` itself stays small for as long as it runs.
"""

from __future__ import annotations

import asyncio
import os

from tollbridge.cli.display import Display
from tollbridge.cli.model import tiny_folder
from tollbridge.cli.stack import COMMAND
from tollbridge.engine.store import DEFAULT_MODEL, resolve_model, smollm2_folder
from tollbridge.errors import StartupError
from tollbridge.worker.supervisor import ManagedProcess, ProcessSpec

TINY = "tiny"


async def prepare_model(model: str, display: Display) -> str:
    """Return the model as the workers are told it, once it is on this machine; StartupError when it cannot be."""
    if model == DEFAULT_MODEL:
        if not smollm2_folder().is_dir():
            await _pull(model, display)
        return model
    if model == TINY:
        if not tiny_folder().is_dir():
            await _pull(model, display)
        return str(tiny_folder())
    return str(await asyncio.to_thread(resolve_model, model))


async def _pull(name: str, display: Display) -> None:
    """Run `tollbridge model pull` and pass on what it says."""
    display.begin("model", f"fetching {name}, once")
    spec = ProcessSpec(name="model", argv=(*COMMAND, "model", "pull", name), environ=os.environ)
    process = await ManagedProcess.start(spec, on_line=lambda _, line: display.note(f"  {line}"))
    try:
        returncode = await process.wait()
    finally:
        await process.stop()
    if returncode:
        reason = " ".join(process.tail(1)) or "it said nothing."
        raise StartupError(f"the model {name} could not be fetched: {reason.removeprefix('tollbridge: ')}")
    display.end("model", f"{name} is there")
