"""`tollbridge up` and `demo` for real: processes, sockets, a tiny model; and nothing is left, however they end."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import psutil
import pytest

from tests.support.processes import wait_gone
from tollbridge.cli.client import Answer, RouterClient
from tollbridge.cli.up import check_port_free, program
from tollbridge.config.cluster import RouterConfig
from tollbridge.errors import StartupError

CLUSTER = """
engine: {kv_cache_mib: 32, threads: 1, max_num_batched_tokens: 128}
workers: [{name: p0, prefer: prefill}, {name: d0, prefer: decode}]
"""


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model cache of its own: the first `up` makes the tiny model, the others find it."""
    return {**os.environ, "TOLLBRIDGE_HOME": str(tmp_path_factory.mktemp("home"))}


@pytest.fixture
def cluster_file(tmp_path: Path) -> Path:
    path = tmp_path / "tollbridge.yaml"
    path.write_text(CLUSTER)
    return path


def command(name: str, cluster_file: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "tollbridge", name, "--config", str(cluster_file), "--model", "tiny", *more]


@contextmanager
def running_up(cluster_file: Path, environ: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield the process of `up --port 0` and its URL, once it says that it serves."""
    log = cluster_file.with_suffix(".log")
    argv = command("up", cluster_file, "--port", "0")
    with log.open("w") as stderr, subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=stderr, stdin=subprocess.DEVNULL, text=True, env=environ
    ) as up:  # fmt: skip
        try:
            assert up.stdout is not None
            line = up.stdout.readline()
            assert line.startswith("Tollbridge is at http://127.0.0.1:"), log.read_text()
            yield up, line.split()[-1]
        finally:
            up.kill()


def test_the_command_to_paste_is_one_that_a_shell_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "a folder" / "tollbridge"
    script.parent.mkdir()
    script.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(script), "up"])
    assert program() == f"'{script}'"
    monkeypatch.setenv("PATH", str(script.parent))
    assert program() == "tollbridge"
    monkeypatch.setattr(sys, "argv", ["/lib/tollbridge/__main__.py", "up"])
    assert program() == "tollbridge"


def children(process: subprocess.Popen[str]) -> dict[str, int]:
    """Return the pids of the stack by name, of the workers' I/O processes too."""
    found = psutil.Process(process.pid).children(recursive=True)
    return {_name(child): child.pid for child in found}


def _name(process: psutil.Process) -> str:
    line = process.cmdline()
    if "tollbridge.transfer.outboard_main" in line:
        return f"io {process.pid}"
    return line[line.index("--name") + 1] if "--name" in line else "router"


async def ask(url: str, policy: str) -> Answer:
    async with RouterClient(url) as client:
        messages = [{"role": "user", "content": f"{policy}: " + "how heavy is the cart? " * 20}]
        return await client.chat(messages, policy=policy, max_tokens=4, temperature=0)


def test_serve_both_ways_chat_and_ctrl_c(cluster_file: Path, environ: dict[str, str]) -> None:
    with running_up(cluster_file, environ) as (up, url):
        answers = {policy: asyncio.run(ask(url, policy)) for policy in ("split", "local")}
        chat = subprocess.run(
            [sys.executable, "-m", "tollbridge", "chat", "--url", url, "--policy", "split", "--max-tokens", "3", "Hi"],
            capture_output=True, check=True,
        )  # fmt: skip
        pids = children(up)
        up.send_signal(signal.SIGINT)
        assert up.wait(180) == 130, cluster_file.with_suffix(".log").read_text()
    split, local = answers["split"].record, answers["local"].record
    assert split is not None
    assert local is not None
    assert (split.decision.choice, split.happened.split_verified) == ("split", True), split
    assert (local.decision.choice, local.happened.prefill_report) == ("local", None), local
    assert b"[split on p0 -> d0; first token after" in chat.stderr, chat.stderr
    assert {name for name in pids if not name.startswith("io ")} == {"p0", "d0", "router"}
    assert len(pids) == 3 + 4  # each worker sends and receives
    for pid in pids.values():
        wait_gone(pid)


def test_a_killed_worker_comes_back_and_a_drain_lets_a_stream_finish(
    cluster_file: Path, environ: dict[str, str]
) -> None:
    with running_up(cluster_file, environ) as (up, url):
        pids, base = children(up), url.removesuffix("/v1")
        os.kill(pids["d0"], signal.SIGKILL)
        _wait(lambda: _num_returns(base, "d0") == 2)
        answers = {policy: asyncio.run(ask(url, policy)) for policy in ("split", "local")}
        with _streaming(base) as stream:
            assert stream.read(6) == b"data: "
            up.send_signal(signal.SIGTERM)
            _wait(lambda: _health(base) == 503)
            assert stream.read().endswith(b"data: [DONE]\n\n")
        assert up.wait(180) == 0, cluster_file.with_suffix(".log").read_text()
    split = answers["split"].record
    assert split is not None
    assert (split.decision.choice, split.happened.split_verified) == ("split", True), split
    for pid in pids.values():
        wait_gone(pid)
    log = cluster_file.with_suffix(".log").read_text()
    assert "tollbridge: d0 was ended by signal 9 (Killed)" in log
    assert "It is started again in 0.5 s (restart 1)." in log
    assert "tollbridge: d0 is ready again" in log


def _streaming(url: str) -> http.client.HTTPResponse:
    body = {"prompt": list(range(10, 60)), "max_tokens": 800, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    return cast(http.client.HTTPResponse, urllib.request.urlopen(request, timeout=60))


def _health(url: str) -> int:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def _num_returns(url: str, name: str) -> int:
    """Return how often the router saw the worker become ready."""
    with urllib.request.urlopen(f"{url}/fleet", timeout=60) as answer:
        workers = json.load(answer)["workers"]
    return next(int(worker["num_returns"]) for worker in workers if worker["name"] == name)


def _wait(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def test_the_demo_verifies_its_split(cluster_file: Path, environ: dict[str, str]) -> None:
    done = subprocess.run(command("demo", cluster_file), capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    assert "The split is verified" in " ".join(done.stdout.split())
    assert "KV payload shipped" in done.stdout
    assert "The answers differ because the prompts do" in done.stdout


def test_a_port_in_use_is_told_before_anything_starts(cluster_file: Path, environ: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        argv = command("up", cluster_file, "--port", port)
        done = subprocess.run(argv, capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 3
    assert done.stderr == (
        f"tollbridge: the router cannot listen on 127.0.0.1 port {port} (Address already in use): "
        "choose another port with --port, or --port 0 for any free one.\n"
    )


def test_a_host_that_does_not_exist_is_told_in_words() -> None:
    with pytest.raises(StartupError, match=r"cannot listen on not a host port 0 \((?!Unknown error)"):
        check_port_free(RouterConfig(host="not a host", port=0))


def test_a_worker_that_cannot_start_is_told(cluster_file: Path, environ: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cluster_file.write_text(f"workers: [{{name: w0, url: 'http://127.0.0.1:{port}'}}]")
        argv = command("up", cluster_file, "--port", "0")
        done = subprocess.run(argv, capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 3, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("tollbridge: w0 ended with exit code 3; it last said:")
    assert str(port) in last
