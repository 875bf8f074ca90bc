"""The file of a run: append-only, and a run that was cut off goes on where it stopped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from tollbridge.bench.records import Head, Line, LinkRate, Plan, Sample, Window, decode, encode
from tollbridge.errors import ConfigError


class Book:
    """All lines of one run. What belongs to a window that was cut off is left out."""

    def __init__(self, path: Path, head: Head) -> None:
        """Open `path`, or begin it; ConfigError when it holds another run."""
        self.path = path
        self.head = head
        self.plan: Plan | None = None
        self.samples: list[Sample] = []
        self.windows: list[Window] = []
        self.links: list[LinkRate] = []
        if path.exists() and path.stat().st_size:
            self._read()
        else:
            self._append([head])

    def has(self, cell: str, block: int, arm: str) -> bool:
        return any((w.cell, w.block, w.arm) == (cell, block, arm) for w in self.windows)

    def keep(self, plan: Plan) -> None:
        """Hold the plan for the rest of the run, resumed or not."""
        self.plan = plan
        self._append([plan])

    def link(self, rate: LinkRate) -> None:
        self._append([rate])
        self.links.append(rate)

    def add(self, samples: Sequence[Sample], window: Window) -> None:
        """Write one complete window."""
        self._append([*samples, window])
        self.samples += samples
        self.windows.append(window)

    def _append(self, lines: Sequence[Line]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(b"".join(map(encode, lines)))
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}.") from None

    def _read(self) -> None:
        raw = self.path.read_bytes()
        if not raw.endswith(b"\n"):  # the run was killed while it wrote
            raw = raw[: raw.rfind(b"\n") + 1]
            self.path.write_bytes(raw)
        lines = read_lines(raw, self.path)
        self._check(lines)
        pending: list[Sample] = []
        for line in lines[1:]:
            if isinstance(line, Sample):
                pending.append(line)
            elif isinstance(line, Window):
                key = (line.cell, line.block, line.arm)
                mine = {s.index: s for s in pending if (s.cell, s.block, s.arm) == key}  # the last of each counts
                self.samples += mine.values()
                self.windows.append(line)
                pending = []
            elif isinstance(line, Plan):
                self.plan = line
            elif isinstance(line, LinkRate):
                self.links.append(line)

    def _check(self, lines: Sequence[Line]) -> None:
        first = lines[0] if lines else None
        if not isinstance(first, Head):
            raise ConfigError(f"{self.path} is not the record of a bench run: give another --out.")
        if _what(self.head) != _what(first):
            raise ConfigError(
                f"{self.path} holds another run ({first.experiment}, seed {first.seed}, or other parameters or workers)"
                ": give another --out to begin a new one."
            )
        self.head = first


def _what(head: Head) -> object:
    """Return what two runs must have in common to be one: of the conditions what was measured, not when."""
    measured = {name: head.conditions.get(name) for name in ("model", "engine")}
    return msgspec.to_builtins(msgspec.structs.replace(head, conditions=measured))


def read_lines(raw: bytes, path: Path) -> list[Line]:
    """Return all lines; ConfigError naming the first that is none of ours."""
    lines: list[Line] = []
    for number, text in enumerate(raw.splitlines(), start=1):
        try:
            lines.append(decode(text))
        except msgspec.DecodeError as error:
            raise ConfigError(f"Line {number} of {path} is not one of a bench run: {error}.") from None
    return lines


def load(path: Path) -> Book:
    """Open a finished run; ConfigError when there is none."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    lines = read_lines(raw[: raw.rfind(b"\n") + 1], path)
    if not lines or not isinstance(lines[0], Head):
        raise ConfigError(f"{path} is not the record of a bench run.")
    return Book(path, lines[0])
