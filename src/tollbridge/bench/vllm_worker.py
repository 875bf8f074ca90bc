"""Workers of the bench that are vLLM servers with our connector, on this machine."""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tollbridge.errors import ConfigError, StartupError
from tollbridge.vllm.addresses import free_port
from tollbridge.vllm.environment import look_into

PYTHON_VARIABLE = "TOLLBRIDGE_VLLM_PYTHON"
CPU_ARGS = "--dtype float32 --enforce-eager"  # bfloat16 is emulated on most CPUs, and compiling takes minutes
_LOOPBACK = "127.0.0.1"
_KV_CACHE_GIB = 1  # unless vLLM's own VLLM_CPU_KVCACHE_SPACE says otherwise
_TRIES = 20


@dataclass(frozen=True, kw_only=True)
class Vllm:
    """The vLLM of this machine that the workers run."""

    python: str
    args: Sequence[str]  # vLLM's own flags
    about: str  # version and flags, for the conditions of a report
    on_cpu: bool


def find_vllm(args: str, environ: Mapping[str, str]) -> Vllm:
    """Return the vLLM that PYTHON_VARIABLE names, with `args` or what a CPU needs.

    StartupError when it cannot run; ConfigError when `args` are no words of a shell.
    """
    python = environ.get(PYTHON_VARIABLE) or sys.executable
    how = f"with {PYTHON_VARIABLE}"
    found = look_into(python, environ, how=how)
    found.check(python, "tollbridge", allow_untested=False, how=how)
    given = args or (CPU_ARGS if found.target == "cpu" else "")
    version = found.vllm or found.vllm_cpu
    try:
        words = shlex.split(given)
    except ValueError as error:
        raise ConfigError(f"--engine-args {given!r} cannot be taken apart: {error}.", param="engine_args") from None
    about = f"vLLM {version} ({found.target}) {given}".rstrip()
    return Vllm(python=python, args=words, about=about, on_cpu=found.target == "cpu")


def vllm_worker(
    worker: Mapping[str, object], model: str, vllm: Vllm, engine: Mapping[str, object], address: str | None
) -> dict[str, object]:
    """Return `worker`, as the cluster file writes it, with the command that runs it on `vllm`; None: on loopback.

    Of `engine`, which describes embedded workers, the chunk size counts here, too.
    """
    host = address or _LOOPBACK
    flags = ["--host", host, "--port", "0", "--kv-host", host, "--kv-port", "0", "--threads", "1"]
    flags += ["--kv-cache-gib", str(_KV_CACHE_GIB), "--events-port", str(_free_pair(host)), "--python", vllm.python]
    chunk = engine.get("max_num_batched_tokens")
    own = [*vllm.args, *(("--max-num-batched-tokens", str(chunk)) if chunk else ())]
    return {**worker, "engine": "vllm", "command": ["worker", "vllm", model, *flags, "--", *own]}


def _free_pair(host: str) -> int:
    """Return a port that is free now, as is the one after it."""
    for _ in range(_TRIES):
        port = free_port(host)
        with suppress(OSError, OverflowError), socket.socket() as probe:
            probe.bind((host, port + 1))
            return port
    raise StartupError(f"There are no two free ports side by side on {host}.")
