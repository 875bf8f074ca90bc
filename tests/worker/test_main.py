"""How a worker process starts and ends."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.worker.process import Worker
from tests.worker.support import SECRET, params
from tollbridge.wire import sse


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    """Start a worker whose tokens take 30 ms each."""
    made = Worker(tmp_path / "w.log", step_s=0.03)
    try:
        made.ready()
        yield made
    finally:
        made.stop()


@asynccontextmanager
async def streaming(worker: Worker, max_tokens: int) -> AsyncIterator[aiohttp.ClientResponse]:
    """Start a stream and wait for its first event."""
    body = {"prompt": "hello", "max_tokens": max_tokens, "stream": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(worker.url + "/v1/completions", json=body) as response,
    ):
        await response.content.readuntil(b"\n\n")
        yield response


async def rest(response: aiohttp.ClientResponse) -> list[dict[str, object]]:
    raw = await response.content.read()
    assert raw.endswith(sse.DONE)
    return [json.loads(event) for event in sse.Parser().feed(raw.removesuffix(sse.DONE))]


async def test_sigterm_lets_a_running_stream_finish(worker: Worker) -> None:
    async with streaming(worker, 50) as response:
        worker.process.send_signal(signal.SIGTERM)
        chunks = await rest(response)
    assert len(chunks) == 49
    assert "error" not in chunks[-1]
    assert await asyncio.to_thread(worker.end) == 0
    assert "drained=True" in worker.log.read_text()


async def test_a_second_signal_ends_it_with_an_honest_event(worker: Worker) -> None:
    async with streaming(worker, 120) as response:
        worker.process.send_signal(signal.SIGINT)
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.get(worker.url + "/health") as health:
                    if health.status == 503:
                        break
        worker.process.send_signal(signal.SIGTERM)
        *chunks, last = await rest(response)
    assert len(chunks) < 119
    assert "shutting down" in str(last["error"])
    assert await asyncio.to_thread(worker.end) == 0
    assert "drained=False" in worker.log.read_text()


def test_idle_worker_ends_at_once_and_says_nothing_more_on_stdout(worker: Worker) -> None:
    assert worker.process.stdout is not None
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(60) == 0
    assert worker.process.stdout.read() == b""


async def test_prompts_and_secrets_stay_out_of_the_log(worker: Worker) -> None:
    body = {"prompt": "my private words", "max_tokens": 2, "kv_transfer_params": params("decode")}
    async with aiohttp.ClientSession() as session:
        async with session.post(worker.url + "/v1/completions", json=body) as response:
            assert response.status == 200
        async with session.post(worker.url + "/v1/completions", json={**body, "prompt": ""}) as response:
            assert response.status == 400
    assert await asyncio.to_thread(worker.stop) == 0
    log = worker.log.read_text()
    assert "role=decode" in log
    assert "private" not in log
    assert SECRET.decode() not in log
    assert body["kv_transfer_params"]["tollbridge"]["sig"] not in log


@pytest.mark.parametrize(("taken", "word"), [("cores", "4095"), ("events", "events"), ("url", "listen on")])
def test_start_up_failures_are_one_sentence_and_exit_code_3(
    worker: Worker, tmp_path: Path, taken: str, word: str
) -> None:
    other = Worker(tmp_path / "other.log", **{taken: [4095] if taken == "cores" else worker.said[taken]})
    assert other.end() == 3
    (line,) = other.log.read_text().splitlines()
    assert word in line


def test_no_file_of_a_worker_takes_the_place_of_its_stdin() -> None:
    """A child would find /dev/null there instead."""
    code = (
        "import os; from tollbridge.worker.main import occupy_standard_files; "
        "occupy_standard_files(); print(os.memfd_create('kv'))"
    )
    argv = ["sh", "-c", 'exec "$0" -c "$1" <&-', sys.executable, code]
    assert int(subprocess.run(argv, capture_output=True, check=True, text=True).stdout) > 2
