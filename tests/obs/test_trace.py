"""A trace: one JSON line per event, in a file of the process."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tollbridge.errors import StartupError
from tollbridge.obs.trace import Trace


def test_one_line_per_event(tmp_path: Path) -> None:
    before_s = time.monotonic()
    trace = Trace(str(tmp_path / "new"), "worker0")
    trace.note("load", transfer="ab")
    trace.note("finish", sent=["p1"])
    trace.close()
    first, second = map(json.loads, (tmp_path / "new" / f"worker0-{os.getpid()}.jsonl").read_text().splitlines())
    assert first == {"t": first["t"], "event": "load", "transfer": "ab"}
    assert second["sent"] == ["p1"]
    assert before_s - 1e-5 <= first["t"] <= second["t"] <= time.monotonic() + 1e-5


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="name another folder"):
        Trace(str(tmp_path / "file"), "scheduler")
