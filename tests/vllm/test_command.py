"""The way of docs/vllm.md with real servers: `tollbridge worker vllm` twice, then the doctor, then a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.processes import group, wait_gone
from tests.vllm.pair import PYTHON, ROOT, SECRET, START_S
from tollbridge.wire.ready import Ready

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

FLAGS = ["--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]


class Worker:
    """One `tollbridge worker vllm`."""

    def __init__(self, name: str, model: Path, folder: Path) -> None:
        self.log = folder / f"{name}.log"
        argv = ["worker", "vllm", str(model), "--port", "0", "--kv-port", "0", "--served-model-name", "tiny"]
        argv += ["--threads", "1", "--kv-cache-gib", "1", "--python", PYTHON, "--", *FLAGS]
        environ = {
            **os.environ,
            "TOLLBRIDGE_SECRET": SECRET,
            "PYTHONPATH": str(ROOT / "src"),
            "VLLM_CPU_CI_ENV": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tollbridge", *argv], stdout=subprocess.PIPE, stderr=log, env=environ, cwd=folder
            )

    def ready(self) -> Ready:
        watchdog = threading.Timer(START_S, self.process.kill)
        watchdog.start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        watchdog.cancel()
        assert line, self.log.read_text()[-3000:]
        return msgspec.json.decode(line, type=Ready)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(180)
        finally:
            self.process.kill()
            assert self.process.stdout is not None
            self.process.stdout.close()


@pytest.fixture
def workers(tiny_model: Path, tmp_path: Path) -> Iterator[list[Worker]]:
    workers = [Worker(name, tiny_model, tmp_path) for name in "pd"]
    yield workers
    for worker in workers:
        if worker.process.poll() is None:
            worker.stop()


def test_from_nothing_to_a_verified_split(workers: list[Worker], tmp_path: Path) -> None:
    p, d = (worker.ready() for worker in workers)
    assert (p.model, p.ready) == ("tiny", "worker")
    where = ["--prefill", p.url, "--decode", d.url, "--prefill-kv", str(p.kv), "--decode-kv", str(d.kv)]
    said = subprocess.run(
        [sys.executable, "-m", "tollbridge", "doctor", "--json", *where],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "TOLLBRIDGE_SECRET": SECRET}, check=False,
    )  # fmt: skip
    report = json.loads(said.stdout)
    assert [finding for finding in report["findings"] if finding["ok"] is False] == []
    assert said.returncode == 0
    checks = {finding["check"]: finding["said"] for finding in report["findings"] if finding["ok"]}
    assert {"kv port", "secret", "fingerprint", "clock", "split", "goodput"} <= checks.keys()
    assert "decode loaded 1023 of 1024 prompt tokens" in checks["split"]
    processes = [pid for leader in (p.pid, d.pid) for pid in group(leader)]
    assert len(processes) > 2  # each server has an engine and a worker
    assert [worker.stop() for worker in workers] == [0, 0]
    for pid in processes:
        wait_gone(pid)
