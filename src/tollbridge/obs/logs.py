"""Structured logs on stderr: key=value for people, JSON for machines, one line per request.

Fields are named one by one where they are logged; prompts, outputs and secrets have no field.
"""

from __future__ import annotations

import logging
import sys
import time
from functools import lru_cache
from typing import TextIO

import msgspec

Value = str | int | float | bool | None


def configure(*, level: str = "INFO", json: bool = False, stream: TextIO | None = None) -> None:
    """Send the records of `tollbridge.*` and the warnings of others to `stream` (default stderr), once per process."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if json else KeyValueFormatter())
    _leave_out_what_no_line_has()
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("tollbridge").setLevel(level)


def _leave_out_what_no_line_has() -> None:
    """Tell the library not to find out process, thread and caller of each record: a third of what a line costs.

    As its manual says under "Optimization".
    """
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None


def request_line(logger: logging.Logger, **fields: Value) -> None:
    """Write the one line of a request at info. Fields that are None are left out."""
    if logger.isEnabledFor(logging.INFO):
        known = {name: value for name, value in fields.items() if value is not None}
        logger.info("request", extra={"fields": known})


class KeyValueFormatter(logging.Formatter):
    """`2026-11-29T12:00:00Z INFO tollbridge.worker request role=decode finish=stop`."""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_utc(record.created)} {record.levelname} {record.name} {record.getMessage()}"
        pairs = "".join(f" {name}={_plain(value)}" for name, value in _fields(record).items())
        return head + pairs + _traceback(self, record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Value] = {
            "time": _utc(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def _fields(record: logging.LogRecord) -> dict[str, Value]:
    return getattr(record, "fields", None) or {}


def _plain(value: Value) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    # A value with spaces, quotes or line ends is quoted, so that one record stays one line.
    is_bare = text.isprintable() and " " not in text and '"' not in text and "=" not in text
    return text if is_bare else msgspec.json.encode(text).decode()


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return "\n" + formatter.formatException(record.exc_info) if record.exc_info else ""


def _utc(at_s: float) -> str:
    return f"{_second(int(at_s))}.{int(at_s % 1 * 1000):03d}Z"


@lru_cache(maxsize=8)
def _second(at_s: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at_s))
