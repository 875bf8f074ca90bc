"""Restarts embedded workers in a fraction of a second: a process that has imported torch once, and forks.

    with Zygote() as zygote:
        pid = zygote.start("d0", config, log)    # returns at once; ask /health whether it serves
        os.kill(pid, signal.SIGKILL)

Each worker is what `tollbridge worker` runs, in a process of its own; only the import is shared. Nothing may start a
thread before the fork, so torch is imported and not used.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

_PR_SET_PDEATHSIG = 1


class Zygote:
    """The parent of the workers. Leaving the context kills all of them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        argv = [sys.executable, "-m", "benchmarks.support.zygote"]
        settings = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root, env={**environ, **settings},
            start_new_session=True,
        )  # fmt: skip
        self._pids: set[int] = set()

    def start(self, name: str, config: Path, log: Path) -> int:
        """Fork worker `name` of the cluster file `config` and return its process id."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{name}\t{config}\t{log}\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        self._pids.add(pid)
        return pid

    def kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self._pids.discard(pid)

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *exc: object) -> None:
        for pid in list(self._pids):
            self.kill(pid)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def main() -> None:
    """Fork one worker for each line on stdin."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM  # each attribute is imported when it is asked for

    from tollbridge.config.load import load
    from tollbridge.engine import build  # noqa: F401 - imported before the forks, for all of them
    from tollbridge.worker import main as worker_main

    assert torch.__version__
    assert AutoTokenizer is not None and LlamaForCausalLM is not None
    assert threading.active_count() == 1, "a fork takes one thread along"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
    for line in sys.stdin:
        name, config, log = line.rstrip("\n").split("\t")
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody outlives the zygote
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        cluster = load(Path(config)).cluster
        worker = next(one for one in cluster.workers if one.name == name)
        code = 1
        try:
            code = worker_main.run_worker(
                cluster=cluster, worker=worker, secret=os.environ["TOLLBRIDGE_SECRET"].encode()
            )
        finally:
            os._exit(code)


if __name__ == "__main__":
    main()
