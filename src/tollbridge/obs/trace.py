"""A trace for people who take a delay apart: one JSON line per event, with the time that all processes of a host share.

    {"t": 1234.567890, "event": "opened", "transfer": "…"}        t: CLOCK_MONOTONIC, seconds

Off unless asked for. An event costs one system call, some microseconds.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from tollbridge.errors import StartupError


class Trace:
    """Appends events to a file of this process. Any thread."""

    def __init__(self, folder: str, name: str) -> None:
        """Open `folder`/`name`-PID.jsonl; StartupError when that cannot be written."""
        path = Path(folder) / f"{name}-{os.getpid()}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartupError(f"The trace {path} cannot be written ({error}): name another folder.") from None

    def note(self, event: str, **fields: object) -> None:
        """Write one event, now."""
        line = {"t": round(time.monotonic(), 6), "event": event, **fields}
        os.write(self._fd, msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        os.close(self._fd)
