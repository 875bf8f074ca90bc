"""`tollbridge probe engine`: how fast is the engine behind a URL? Writes the calibration file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

OutFile = Annotated[Path, Parameter(help="The calibration file to write; what else is in it stays.")]
Json = Annotated[bool, Parameter(negative=(), show_default=False, help="Print one JSON document.")]


def engine(
    url: Annotated[str, Parameter(help="Of one server: http://HOST:PORT.")],
    *,
    model: Annotated[str | None, Parameter(help="Where the server has several.")] = None,
    name: Annotated[
        str | None, Parameter(help="Of the worker in the cluster file; default: what it says itself, or `engine`.")
    ] = None,
    api_key_env: Annotated[str, Parameter(help="The environment variable with the API key.")] = "TOLLBRIDGE_API_KEY",
    max_num_batched_tokens: Annotated[
        int | None, Parameter(help="Token budget of a step, where the server does not say it; default 2048.")
    ] = None,
    out: OutFile = Path("calibration.json"),
    quick: Annotated[bool, Parameter(negative=(), show_default=False, help="45 seconds instead of 4 minutes.")] = False,
    json: Json = False,
) -> int:
    """Measure prefill by length and context, and the decode step by batch."""
    import asyncio
    import os

    import msgspec

    from tollbridge.config.calibration import merge_calibration
    from tollbridge.errors import ConfigError
    from tollbridge.probe.engine import FULL, QUICK, EngineReport
    from tollbridge.probe.engine_text import render
    from tollbridge.probe.run import probe_engine

    if max_num_batched_tokens is not None and max_num_batched_tokens < 1:
        raise ConfigError("--max-num-batched-tokens must be at least 1.")
    check_out(out)  # before four minutes are spent

    async def measure(tell: Callable[[str, float], None]) -> EngineReport:
        return await probe_engine(
            url,
            model=model,
            api_key=os.environ.get(api_key_env),
            budget=max_num_batched_tokens,
            effort=QUICK if quick else FULL,
            tell=tell,
        )

    with progress() as tell:
        report = asyncio.run(measure(tell))
    called = name or report.served.name or "engine"
    merge_calibration(out, engines={called: report.calibration}, measured_at=now())
    if json:
        found = {"name": called, "notes": report.notes, "fixed_s": report.fixed_s, "engine": report.calibration}
        print(msgspec.json.encode(found).decode())
    else:
        tell_written(render(report), out, f"engine {called}")
    return 0


def check_out(out: Path) -> None:
    """Raise ConfigError when figures could not be put into `out`: no calibration, or a folder that takes no file."""
    import os

    from tollbridge.config.calibration import read_calibration
    from tollbridge.errors import ConfigError

    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"The calibration file {out} cannot be written: {out.parent} is no folder that takes files.")
    if out.exists():
        read_calibration(out)


@contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """Show on stderr what is being measured and how far it is, where somebody can see it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("connecting", total=1.0)
        yield lambda what, done: bar.update(task, description=what, completed=done)


def tell_written(report: object, out: Path, what: str) -> None:
    from rich.console import Console

    console = Console()
    console.print(report)
    console.print(f"Written to {out} as {what}.", style="dim", highlight=False)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
