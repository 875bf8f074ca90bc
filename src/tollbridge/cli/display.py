"""How a start-up looks: spinners with seconds on a terminal, one plain line per event anywhere else."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class Display(Protocol):
    """Told of each step; a step is begun once and ended once."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def begin(self, step: str, doing: str) -> None: ...

    def end(self, step: str, done: str) -> None: ...

    def note(self, text: str) -> None: ...


def make_display() -> Display:
    """Return the display for this process's stderr."""
    return LiveDisplay() if sys.stderr.isatty() else PlainDisplay()


class PlainDisplay:
    """Lines on stderr, for logs and pipes."""

    def __init__(self) -> None:
        self._begun_s: dict[str, float] = {}

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def begin(self, step: str, doing: str) -> None:
        self._begun_s[step] = time.monotonic()
        self.note(f"{step}: {doing}")

    def end(self, step: str, done: str) -> None:
        elapsed_s = time.monotonic() - self._begun_s.pop(step)
        self.note(f"{step}: {done} ({elapsed_s:.1f} s)")

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class LiveDisplay:
    """One line per step that turns while it works."""

    def __init__(self) -> None:
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("[bold]{task.fields[step]:<8}"),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, step: str, doing: str) -> None:
        self._tasks[step] = self._progress.add_task(doing, total=1, step=step)

    def end(self, step: str, done: str) -> None:
        self._progress.update(self._tasks.pop(step), description=done, completed=1)

    def note(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False)
