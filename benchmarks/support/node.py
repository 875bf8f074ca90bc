"""A process on one host of a link, on one core, that does what the driver asks: one JSON document a line, both ways.

The process lives for the whole claim, so that the arms of a repetition find the same warm memory and connections.
Its methods are those of the class it was started with (`module:Class`, see kv_node.py).
"""

from __future__ import annotations

import importlib
import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

_ROOT = Path(__file__).parents[2]


class NodeError(RuntimeError):
    """A node failed or did not answer in time."""


class Node:
    """The driver's side. `call` asks and waits; `begin` asks and `result` waits, so that two nodes work at a time."""

    def __init__(
        self,
        target: str,
        *,
        core: int | None,
        prefix: Sequence[str] = (),
        environ: dict[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        argv = [*prefix, python, "-m", "benchmarks.support.node", target]
        path = os.pathsep.join([str(_ROOT), str(_ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        base = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**base, **(environ or {})}
        )
        self._buffer = b""
        self.pid = int(self.call("pid", core=core))

    def call(self, method: str, *, timeout_s: float = 300.0, **arguments: object) -> Any:
        """Run a method over there and return what it returns; NodeError with its traceback when it raises."""
        self.begin(method, **arguments)
        return self.result(timeout_s)

    def begin(self, method: str, **arguments: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([method, arguments]).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise NodeError(f"A node is gone (exit status {self._process.wait()}).") from None

    def result(self, timeout_s: float = 300.0) -> Any:
        outcome, value = json.loads(self._line(timeout_s))
        if outcome == "error":
            raise NodeError(value)
        return value

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        descriptor, deadline_s = self._process.stdout.fileno(), time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise NodeError(f"A node did not answer within {timeout_s:g} s.")
            data = os.read(descriptor, 1 << 20)
            if not data:
                raise NodeError(f"A node is gone (exit status {self._process.wait()}).")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def serve(target: object) -> None:
    """Answer the driver until it closes the pipe. stdout belongs to the answers: what is printed goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        method, arguments = json.loads(line)
        try:
            action = _settle if method == "pid" else getattr(target, method)
            answer = ["ok", action(**arguments)]
        except Exception:
            answer = ["error", traceback.format_exc()]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _settle(core: int | None) -> int:
    if core is not None:
        os.sched_setaffinity(0, {core})
    return os.getpid()


if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    serve(getattr(importlib.import_module(module), name)())
