"""The model of a cluster that is about to start: fetch or make it when it is missing.

That takes torch, so a child process does it: `up` itself stays small for as long as it runs.
"""

from __future__ import annotations

import subprocess
import sys

from tollbridge.cli.model import tiny_folder
from tollbridge.cli.stack import COMMAND
from tollbridge.engine.store import DEFAULT_MODEL, resolve_model, smollm2_folder
from tollbridge.errors import StartupError

TINY = "tiny"


def prepare_model(model: str) -> str:
    """Return the model as the workers are told it, once it is on this machine; StartupError when it cannot be."""
    if model == DEFAULT_MODEL:
        if not smollm2_folder().is_dir():
            _pull(model)
        return model
    if model == TINY:
        if not tiny_folder().is_dir():
            _pull(model)
        return str(tiny_folder())
    return str(resolve_model(model))


def _pull(name: str) -> None:
    """Run `tollbridge model pull`, with its progress on our stderr."""
    command = [*COMMAND, "model", "pull", name]
    returncode = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode
    if returncode:
        raise StartupError(f"the model {name} could not be fetched: `tollbridge model pull {name}` tries again.")
