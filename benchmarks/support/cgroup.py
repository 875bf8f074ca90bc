"""What memory a process takes, kernel buffers for its sockets included: a control group with a limit where we may make
one (v2, else v1), the process's own resident set otherwise.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_V2_ROOTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
_V1_ROOT = Path("/sys/fs/cgroup/memory")


class MemoryGauge(Protocol):
    """Bytes now and at most since `reset`."""

    source: str

    def now(self) -> int: ...
    def peak(self) -> int: ...
    def reset(self) -> None: ...


@dataclass
class _Group:
    """A control group; a peak that cannot be reset counts from the start, which overstates and never hides."""

    source: str
    current_files: Sequence[Path]
    peak_files: Sequence[Path]

    def now(self) -> int:
        return sum(int(file.read_text()) for file in self.current_files)

    def peak(self) -> int:
        return sum(int(file.read_text()) for file in self.peak_files)

    def reset(self) -> None:
        for file in self.peak_files:
            with contextlib.suppress(OSError):
                file.write_text("0")


@dataclass
class _Resident:
    """VmRSS and VmHWM: without the kernel's socket buffers, and without a limit."""

    source: str
    pid: int

    def now(self) -> int:
        return self._status("VmRSS")

    def peak(self) -> int:
        return self._status("VmHWM")

    def reset(self) -> None:
        with contextlib.suppress(OSError):
            Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def _status(self, name: str) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return 1024 * int(line.split()[1])
        raise RuntimeError(f"/proc/{self.pid}/status has no {name}")


@contextlib.contextmanager
def limited(pid: int, limit_bytes: int) -> Iterator[MemoryGauge]:
    """Put process `pid` under `limit_bytes` before it allocates, and remove the group after the process has ended."""
    folder, gauge = _make(limit_bytes)
    if folder is None:
        yield _Resident("VmHWM of /proc: no writable memory cgroup, so NO limit and no socket buffers", pid)
        return
    assert gauge is not None
    (folder / "cgroup.procs").write_text(str(pid))
    try:
        yield gauge
    finally:
        for left in (folder / "cgroup.procs").read_text().split():
            (folder.parent / "cgroup.procs").write_text(left)
        folder.rmdir()


def _make(limit_bytes: int) -> tuple[Path | None, MemoryGauge | None]:
    """Return a new group with its gauge, (None, None) when there is none to be had."""
    name = f"tollbridge-bench-{os.getpid()}"
    for root in _V2_ROOTS:
        controllers = root / "cgroup.controllers"
        if controllers.exists() and "memory" in controllers.read_text().split():
            with contextlib.suppress(OSError):
                (root / "cgroup.subtree_control").write_text("+memory")
                folder = _new(root / name, "memory.max", limit_bytes)
                return folder, _Group("cgroup v2 memory.peak", [folder / "memory.current"], [folder / "memory.peak"])
    if (_V1_ROOT / "memory.limit_in_bytes").exists():
        with contextlib.suppress(OSError):
            folder = _new(_V1_ROOT / name, "memory.limit_in_bytes", limit_bytes)
            return folder, _version_1(folder, limit_bytes)
    return None, None


def _version_1(folder: Path, limit_bytes: int) -> MemoryGauge:
    """Return the gauge of a v1 group, which counts socket buffers apart, and only once they have a limit."""
    kinds = ["memory"]
    with contextlib.suppress(OSError):
        (folder / "memory.kmem.tcp.limit_in_bytes").write_text(str(limit_bytes))
        kinds.append("memory.kmem.tcp")
    source = "cgroup v1 max_usage_in_bytes of " + " + ".join(kinds)
    current, peak = ([folder / f"{kind}.{name}" for kind in kinds] for name in ("usage_in_bytes", "max_usage_in_bytes"))
    return _Group(source, current, peak)


def _new(folder: Path, limit_file: str, limit_bytes: int) -> Path:
    folder.mkdir()
    try:
        (folder / limit_file).write_text(str(limit_bytes))
    except OSError:
        folder.rmdir()
        raise
    return folder
