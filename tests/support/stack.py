"""A real stack for integration tests: worker and router processes, with a counting proxy in front of prefill's KV port.

Everything is as `tollbridge up` starts it, except that the router is told the proxy's address for p0: so bytes are
counted, and faults injected, outside the processes under test.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.support.kv_proxy import Fault, Frame, KvProxy, forward

SECRET = "integration-test-secret-0123456789"


class Process:
    """A child whose first stdout line is the ready line."""

    def __init__(self, argv: list[str], log: Path, *, secret: str | None = SECRET) -> None:
        env = dict(os.environ, PYTHONUNBUFFERED="1", OMP_NUM_THREADS="1")
        env.pop("TOLLBRIDGE_SECRET", None)
        env |= {"TOLLBRIDGE_SECRET": secret} if secret else {}
        self.log = log
        self._log_file = log.open("wb")
        self.popen = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=self._log_file, env=env, start_new_session=True
        )
        self.ready: dict[str, Any] = {}

    def wait_ready(self, timeout_s: float = 400.0) -> dict[str, Any]:
        watchdog = threading.Timer(timeout_s, self.popen.kill)
        watchdog.start()
        try:
            assert self.popen.stdout is not None
            line = self.popen.stdout.readline()
        finally:
            watchdog.cancel()
        if not line.startswith(b"{"):
            raise AssertionError(f"not ready: {line!r}; log: {self.log.read_text()[-3000:]}")
        self.ready = json.loads(line)
        return self.ready

    def stop(self) -> int:
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
            try:
                self.popen.wait(60)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait(60)
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        self._log_file.close()
        return self.popen.returncode


def tollbridge(*args: str) -> list[str]:
    return [sys.executable, "-m", "tollbridge.cli.main", *args]


class Counter:
    """Counts the DATA frames that leave prefill, then lets `fault` have its way with them."""

    def __init__(self) -> None:
        self.fault: Fault = forward
        self.payload_bytes = 0
        self.header_bytes = 0
        self.num_frames = 0

    def __call__(self, frame: Frame) -> list[bytes]:
        if frame.is_data:
            self.payload_bytes += len(frame.payload)
            self.header_bytes += len(frame.head)
            self.num_frames += 1
        return self.fault(frame)


class Stack:
    """p0, d0 and a router. `proxy` stands between d0 and p0's KV port."""

    def __init__(
        self, folder: Path, model: str, *, policy: str = "local", dtype: str = "float32", **engine: object
    ) -> None:
        self.folder, self.model = folder, model
        self.engine = {"block_size": 16, "max_num_batched_tokens": 128, "kv_cache_mib": 64, "threads": 1, **engine}
        self.policy, self.dtype = policy, dtype
        self.processes: dict[str, Process] = {}
        self.proxy: KvProxy | None = None
        self.wire = Counter()

    def _config(self, name: str, workers: list[dict[str, object]]) -> str:
        path = self.folder / f"{name}.yaml"
        cluster = {
            "model": self.model,
            "dtype": self.dtype,
            "router": {"port": 0, "policy": self.policy},
            "workers": workers,
            "engine": self.engine,
            "transfer": {"media": "tcp"},  # what the proxy can read
        }
        path.write_text(yaml.safe_dump(cluster))
        return str(path)

    def start(self) -> None:
        bare = [{"name": "p0", "prefer": "prefill"}, {"name": "d0", "prefer": "decode"}]
        config = self._config("workers", bare)
        for worker in bare:
            name = str(worker["name"])
            argv = tollbridge("worker", "--name", name, "--config", config)
            self.processes[name] = Process(argv, self.folder / f"{name}.log")
        ready = {name: process.wait_ready() for name, process in self.processes.items()}
        host, port = ready["p0"]["kv"].rsplit(":", 1)
        self.proxy = KvProxy((host, int(port)), fault=self.wire)
        proxy_host, proxy_port = self.proxy.address
        workers = [
            {"name": n, "prefer": p, "url": ready[n]["url"], "kv": ready[n]["kv"], "events": ready[n]["events"]}
            for n, p in (("p0", "prefill"), ("d0", "decode"))
        ]
        workers[0]["kv"] = f"{proxy_host}:{proxy_port}"
        argv = tollbridge("router", "--config", self._config("router", workers))
        self.processes["router"] = Process(argv, self.folder / "router.log")
        self.processes["router"].wait_ready()

    def stop(self) -> None:
        for name in ("router", "p0", "d0"):
            if name in self.processes:
                self.processes[name].stop()
        if self.proxy is not None:
            self.proxy.close()

    @property
    def url(self) -> str:
        return str(self.processes["router"].ready["url"])

    def worker_url(self, name: str) -> str:
        return str(self.processes[name].ready["url"])

    def metric(self, worker: str, name: str, **labels: str) -> float:
        """Return the value of one sample of a worker's /metrics, 0 when it does not exist yet."""
        from prometheus_client.parser import text_string_to_metric_families

        text = get(self.worker_url(worker) + "/metrics").decode()
        total = 0.0
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    total += sample.value
        return total


@contextmanager
def running(stack: Stack) -> Iterator[Stack]:
    try:
        stack.start()
        yield stack
    finally:
        stack.stop()


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=120) as response:
        return bytes(response.read())


class Answer:
    """A non-streaming answer, or the error it came with."""

    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status, self.headers, self.raw = status, headers, body
        self.json: dict[str, Any] = json.loads(body) if body[:1] in b"{[" else {}

    @property
    def decision(self) -> dict[str, Any]:
        return dict(json.loads(self.headers["x-tollbridge-decision"]))

    @property
    def token_ids(self) -> list[int]:
        return list(self.json["choices"][0]["token_ids"])


def post(url: str, body: object, *, headers: dict[str, str] | None = None, timeout_s: float = 600) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return Answer(response.status, response.headers, response.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.headers, error.read())


def complete(stack: Stack, prompt: list[int], policy: str, *, max_tokens: int = 16, **more: object) -> Answer:
    """Continue a prompt of token ids through the router by the given path; greedy unless `more` says otherwise."""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }
    answer = post(stack.url + "/v1/completions", body, headers={"x-tollbridge-policy": policy})
    assert answer.status == 200, answer.raw
    return answer


def record(stack: Stack, answer: Answer) -> dict[str, Any]:
    """Return what the router knows of the request, `{"decision", "happened"}`, once it has ended."""
    return dict(json.loads(get(f"{stack.url}/decisions/{answer.decision['id']}")))
