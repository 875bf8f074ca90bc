"""A worker as a process of its own, with the real engine or the fake one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.worker.support import SECRET

ROOT = Path(__file__).parents[2]
READY_TIMEOUT_S = 400.0

# argv: cluster as JSON, secret, "real" or the seconds that a step of the fake engine takes
LAUNCH = """
import sys, time, msgspec
from tollbridge.config.cluster import ClusterConfig
from tollbridge.errors import TollbridgeError
from tollbridge.worker import main
cluster, secret, engine = sys.argv[1:]
cluster = msgspec.json.decode(cluster, type=ClusterConfig)
if engine != "real":
    from tests.support.fake_engine import FakeEngine, letters
    def slow(request):
        for output in letters(request):
            time.sleep(float(engine))
            yield output
    main._build = lambda cluster, media: FakeEngine(script=slow)
try:
    sys.exit(main.run_worker(cluster=cluster, worker=cluster.workers[0], secret=secret.encode()))
except TollbridgeError as error:
    print(error.message, file=sys.stderr)
    sys.exit(error.exit_code)
"""


class Worker:
    """One worker process; its log is a file."""

    def __init__(self, log: Path, *, model: Path | None = None, step_s: float = 0.0, **worker: Any) -> None:
        """Start one with the model in the folder `model`, or with a fake engine that steps every `step_s`."""
        cluster = {
            "model": str(model or "fake"),
            "dtype": "float32",
            "workers": [{"name": "w", **worker}],
            "engine": {"kv_cache_mib": 16, "threads": 1, "max_num_batched_tokens": 32},
        }
        self.log = log
        self._log_file = log.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, json.dumps(cluster), SECRET.decode(), "real" if model else str(step_s)],
            stdout=subprocess.PIPE,
            stderr=self._log_file,
            env=dict(os.environ, OMP_NUM_THREADS="1"),
            cwd=ROOT,
        )

    def ready(self) -> dict[str, Any]:
        watchdog = threading.Timer(READY_TIMEOUT_S, self.process.kill)
        watchdog.start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        watchdog.cancel()
        assert line.startswith(b"{"), self.log.read_text()
        self.said = json.loads(line)
        self.url = str(self.said["url"])
        return self.said

    def end(self) -> int:
        """Wait for the end, which somebody has asked for, and return the exit code."""
        try:
            return self.process.wait(120)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self._log_file.close()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.end()
