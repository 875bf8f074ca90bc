"""`tollbridge model pull`: models that can be had without an account."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

Name = Literal["smollm2", "tiny"]


def pull(name: Annotated[Name, Parameter(help="smollm2, or tiny: random weights, for trying things out.")]) -> int:
    """Fetch a model into the cache unless it is there, and say where. `up` does this by itself."""
    from tollbridge.engine.store import pull_smollm2

    if name == "smollm2":
        pull_smollm2(lambda text: print(text, flush=True))
    else:
        print(f"tiny is in {make_tiny()}", flush=True)
    return 0


def tiny_folder() -> Path:
    """Return where the tiny model is kept; it exists only whole."""
    from tollbridge.engine.store import models_folder

    return models_folder() / "tiny"


def make_tiny() -> Path:
    """Make the tiny model unless it is there; return its folder. Two makers at once do no harm."""
    from tollbridge.engine.tiny import make_tiny_model

    folder = tiny_folder()
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tiny-", dir=folder.parent) as work:
        made = make_tiny_model(Path(work) / "tiny")
        try:
            os.rename(made, folder)
        except OSError:
            if not folder.is_dir():  # somebody else was first: theirs is the same
                raise
            shutil.rmtree(made)
    return folder
