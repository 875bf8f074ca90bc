"""Child processes that cannot be forgotten: start, wait until ready, watch, stop, and leave nothing behind.

Each child leads its own process group, so Ctrl-C at the terminal reaches only us, who then stop the children in order,
and so that a child's own children can be ended with it. A child asks the kernel for SIGKILL when we die
(PR_SET_PDEATHSIG, Linux; or for what its spec says), so `kill -9` of the supervisor leaves no orphan serving on a port.

stdout carries the ready line (wire/ready.py) and is otherwise treated like stderr: the last lines are kept for the
sentence about a crash, and each line is offered to `on_line`. Both pipes are always drained, or a child would block.

asyncio's own `Process.wait` returns only when the pipes are closed, which a grandchild may hold open for ever, and has
reaped the child by then. Here a pidfd tells of the end while the child is still a zombie: its group's number stays
taken until we reap it, so the SIGKILL for what is left of the group cannot hit a stranger.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import msgspec

from tollbridge.errors import StartupError, TollbridgeError
from tollbridge.wire.ready import Ready

MAX_LINES = 200  # kept of each child
MAX_LINE_BYTES = 4096  # a longer line is cut
_TAIL_LINES = 5  # of those, in the sentence about a crash
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None  # loaded before any fork

OnLine = Callable[[str, str], None]  # process name, line; must not raise


class ChildError(TollbridgeError):
    """A child process ended, or did not become ready in time."""


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """What to run. Secrets belong in `environ`: every user of the machine can read `argv`."""

    name: str
    argv: Sequence[str]
    environ: Mapping[str, str]
    cores: Sequence[int] | None = None  # None: wherever the kernel likes
    orphaned: signal.Signals = signal.SIGKILL  # what it gets when we die; SIGTERM: it has children of its own to end


@dataclass(frozen=True, kw_only=True)
class ProcessStatistics:
    """A snapshot of one child."""

    pid: int
    returncode: int | None  # None while it runs; negative: the signal that ended it
    is_ready: bool
    lines_total: int


class ManagedProcess:
    """One child, owned by the task that called `start`, from the main thread, and that must call `stop`."""

    def __init__(self, spec: ProcessSpec, process: subprocess.Popen[bytes], on_line: OnLine | None) -> None:
        self.spec = spec
        self._process = process
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._lines_total = 0
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._pipes = [asyncio.create_task(self._drain(pipe)) for pipe in (process.stdout, process.stderr)]
        self._exit = asyncio.create_task(self._reap())

    @classmethod
    async def start(cls, spec: ProcessSpec, *, on_line: OnLine | None = None) -> ManagedProcess:
        """Start the child in a process group of its own; StartupError when it cannot be run at all."""
        try:
            process = subprocess.Popen(  # noqa: ASYNC220 (returns at the child's exec: a few milliseconds)
                spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=spec.environ,
                process_group=0,
                preexec_fn=_in_child(os.getpid(), spec),  # noqa: PLW1509 (see _in_child)
            )
        except OSError as error:
            raise StartupError(f"{spec.name} cannot be started: {spec.argv[0]}: {error.strerror}.") from None
        return cls(spec, process, on_line)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while the child runs."""
        return self._process.returncode

    def statistics(self) -> ProcessStatistics:
        return ProcessStatistics(
            pid=self.pid,
            returncode=self.returncode,
            is_ready=self._ready.done() and not self._ready.cancelled(),
            lines_total=self._lines_total,
        )

    def tail(self, num_lines: int = _TAIL_LINES) -> list[str]:
        """Return the last lines that the child wrote, the ready line left out."""
        return list(self._lines)[-num_lines:]

    async def wait_ready(self, timeout_s: float) -> Ready:
        """Return the ready line; ChildError (StartupError for exit code 3) when it ends or is silent for too long."""
        either: list[asyncio.Future[Any]] = [self._ready, self._exit]
        await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done() and self._exit.done():
            await self._drained()  # a ready line may still be in the pipe
        if self._ready.done():
            return self._ready.result()
        if self._exit.done():
            raise self.death()
        raise ChildError(f"{self.spec.name} was not ready after {timeout_s:.0f} s{self._last_words()}")

    async def wait(self) -> int:
        """Wait until the child has ended and all it wrote is read; return its exit code."""
        returncode = await asyncio.shield(self._exit)
        await self._drained()
        return returncode

    def death(self) -> TollbridgeError:
        """Return the error that says how the child ended."""
        kind = StartupError if self.returncode == StartupError.exit_code else ChildError
        return kind(f"{self.spec.name} {_ending(self.returncode)}{self._last_words()}")

    async def stop(self, grace_s: float = 10.0) -> int:
        """Ask with SIGTERM, insist with SIGKILL after `grace_s`; return the exit code. Idempotent."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGTERM)  # Popen.terminate would reap it first if it has just ended
        try:
            await asyncio.wait({self._exit}, timeout=grace_s)
        finally:
            self.kill()
        returncode = await self.wait()
        self._ready.cancel()
        return returncode

    def kill(self) -> None:
        """Send SIGKILL to the child's whole group, unless the child has been reaped and its group with it."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def _reap(self) -> int:
        """Wait for the child's end, kill what is left of its group, and only then free its number."""
        if hasattr(os, "pidfd_open"):
            await _wait_pidfd(self.pid)
            self.kill()
            return self._process.wait()
        return await asyncio.to_thread(self._process.wait)

    async def _drained(self) -> None:
        """Wait until both pipes are at their end; a descendant that left the group and holds one gets a second."""
        _, pending = await asyncio.wait(self._pipes, timeout=1.0)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    async def _drain(self, pipe: IO[bytes] | None) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        rest = b""
        try:
            while chunk := await reader.read(65536):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._take(line)
                rest = rest[:MAX_LINE_BYTES]
        finally:
            transport.close()
        if rest:
            self._take(rest)

    def _take(self, raw: bytes) -> None:
        line = raw[:MAX_LINE_BYTES].decode(errors="replace").rstrip()
        self._lines_total += 1
        if not self._ready.done():
            ready = maybe_ready(line)
            if ready:
                self._ready.set_result(ready)
                return
        if line:
            self._lines.append(line)
            if self._on_line:
                self._on_line(self.spec.name, line)

    def _last_words(self) -> str:
        tail = self.tail()
        return f"; it last said: {' | '.join(tail)}" if tail else ", and it said nothing."


def maybe_ready(line: str) -> Ready | None:
    """Return the ready line in `line`, None when it is something else."""
    if not line.startswith("{"):
        return None
    try:
        return msgspec.json.decode(line, type=Ready)
    except msgspec.DecodeError:
        return None


async def _wait_pidfd(pid: int) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    descriptor = os.pidfd_open(pid)
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _ending(returncode: int | None) -> str:
    if returncode is None:
        return "is running"
    if returncode < 0:
        return f"was ended by signal {-returncode} ({signal.strsignal(-returncode)})"
    return f"ended with exit code {returncode}"


def _in_child(parent_pid: int, spec: ProcessSpec) -> Callable[[], None]:
    """Return what the child does between fork and exec: system calls only, for the parent may have other threads."""

    def prepare() -> None:
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, int(spec.orphaned), 0, 0, 0)
            if os.getppid() != parent_pid:  # it died before we could ask
                os._exit(1)
        if spec.cores is not None:
            os.sched_setaffinity(0, spec.cores)

    return prepare
