"""A headless Chromium: Debian's, or the one that Playwright has fetched."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
VARIABLE = "TOLLBRIDGE_CHROMIUM"


def find(own: str) -> str | None:
    """Return the program: the one that TOLLBRIDGE_CHROMIUM names, one in the path, or `own`, Playwright's."""
    named = [os.environ.get(VARIABLE), *map(shutil.which, NAMES), own]
    return next((path for path in named if path and Path(path).exists()), None)


def arguments() -> list[str]:
    """Return what Chromium must be told: as root it has no sandbox."""
    return ["--no-sandbox"] if os.geteuid() == 0 else []
