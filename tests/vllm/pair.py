"""Two real vLLM servers on this machine's CPU, started as `tollbridge worker vllm` starts them, and both legs by hand.

The interpreter that has vLLM is not the one that runs the tests: TOLLBRIDGE_VLLM_PYTHON names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import secrets
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from tests.support.processes import group
from tollbridge.engine.tiny import make_tiny_model
from tollbridge.vllm.launch import Media, VllmWorker, command
from tollbridge.wire.params import Role, TransferParams, sign

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("TOLLBRIDGE_VLLM_PYTHON", str(ROOT / ".venv-vllm" / "bin" / "python"))
SECRET = "vllm-test-secret-0123456789"
START_S = 600.0  # two servers on two shared cores
IDLE_S = 180.0  # until what holds blocks has ended; it costs time only where something holds them for ever
# What bounds a transfer, where a test is not about a bound: no machine that stands still for a while ends it.
PATIENT = {"progress_timeout_s": 60.0, "unknown_timeout_s": 60.0, "handshake_timeout_s": 60.0}
_ports = itertools.count(10_000 + os.getpid() % 1000 * 20, 2)


def free_port() -> int:
    """Return a port that is free, with the one above it, and stays free: the kernel gives these numbers to nobody.

    A server binds it much later than it is chosen here; a port of the kernel's choice may be another's by then.
    """
    for port in _ports:
        with socket.socket() as sock, socket.socket() as above, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            above.bind(("127.0.0.1", port + 1))
            return port
    raise AssertionError("there is no end of numbers")


def make_model(kind: str, folder: Path) -> Path:
    """Write the model `kind` of make_model.py into `folder`, with a tokenizer and a chat template."""
    make_tiny_model(folder)
    script = Path(__file__).with_name("make_model.py")
    made = subprocess.run([PYTHON, str(script), kind, str(folder)], check=False, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-2000:]
    return folder


@dataclass
class Server:
    """One vLLM server in a process group of its own."""

    name: str
    model: Path
    folder: Path
    args: Sequence[str]
    transfer: dict[str, Any] = field(default_factory=dict)  # more of kv_connector_extra_config
    media: Media = "tollbridge"
    tokenizer: bool = False  # the model's folder has one
    events_port: int | None = None
    port: int = field(default_factory=free_port)
    kv_port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def start(self) -> None:
        worker = VllmWorker(
            model=str(self.model),
            host="127.0.0.1",
            port=self.port,
            kv_host="127.0.0.1",
            kv_port=self.kv_port,
            events_port=self.events_port,
            served_model_name="tiny",
            target="cpu",
            media=self.media,
            threads=1,
            kv_cache_gib=1,
            python=PYTHON,
            extra_args=(
                *(() if self.tokenizer else ("--skip-tokenizer-init",)),
                "--dtype",
                "float32",
                "--enforce-eager",
                *self.args,
            ),
        )
        launch = command(worker, os.environ)
        index = launch.argv.index("--kv-transfer-config") + 1
        config = msgspec.json.decode(launch.argv[index])
        config.setdefault("kv_connector_extra_config", {}).update(self.transfer)
        nixl = self.media != "tollbridge"
        if nixl:
            config["kv_connector_module_path"] = "tests.vllm.sleeping_nixl"
        launch.argv[index] = msgspec.json.encode(config).decode()
        environ = {
            **launch.environ,
            "TOLLBRIDGE_SECRET": SECRET,
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "VLLM_CPU_CI_ENV": "1",
            "HF_HUB_OFFLINE": "1",
            **({"UCX_TLS": "tcp"} if nixl else {}),  # as where other tests of NIXL have run before, in this process
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                launch.argv, stdout=log, stderr=log, env=environ, cwd=self.folder, start_new_session=True
            )

    def wait_ready(self) -> None:
        assert self.process is not None
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and self.process.poll() is None:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=60):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.5)
        raise AssertionError(f"{self.name} did not start; its log ends with:\n{self.log.read_text()[-3000:]}")

    def refusal(self) -> str:
        """Return the log of a server that ends instead of starting."""
        self.start()
        assert self.process is not None
        try:
            code = self.process.wait(START_S)
            assert code != 0, "it ended without an error"
            return self.log.read_text()
        finally:
            self.stop()

    def unpin(self) -> None:
        """Let all threads run anywhere: NIXL pins each worker to the last core, where two starve each other."""
        assert self.process is not None
        for pid in group(self.process.pid):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(int(thread.name), range(os.cpu_count() or 1))

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Signal the server, then end what is left of its process group: engine and workers outlive a killed server."""
        if self.process is None:
            return
        if number != signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.kill(self.process.pid, number)
                self.process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)
        self.process = None


class Pair:
    """p and d, and a client of both."""

    def __init__(self, p: Server, d: Server) -> None:
        self.p, self.d = p, d

    def start(self) -> None:
        for server in (self.p, self.d):
            server.start()
        for server in (self.p, self.d):
            server.wait_ready()

    def stop(self) -> None:
        for server in (self.p, self.d):
            server.stop()

    @contextlib.contextmanager
    def running(self) -> Iterator[Pair]:
        """Start both at the same time; leaving stops them."""
        try:
            self.start()
            yield self
        finally:
            self.stop()

    def params(self, role: Role, transfer_id: str, **changes: Any) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "v": 1,
            "transfer_id": transfer_id,
            "role": role,
            "host": "127.0.0.1",
            "port": self.p.kv_port,
            "expires": time.time() + 600,
            **changes,
        }
        return {"tollbridge": msgspec.to_builtins(sign(TransferParams(**fields), SECRET.encode()))}

    async def complete(
        self, server: Server, prompt: list[int], max_tokens: int, params: object = None, **more: Any
    ) -> dict[str, Any]:
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "detokenize": False,
            **({"kv_transfer_params": params} if params is not None else {}),
            **more,
        }
        timeout = aiohttp.ClientTimeout(total=600)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(server.url + "/v1/completions", json=body) as answer,
        ):
            assert answer.status == 200, await answer.text()
            return dict(await answer.json())

    async def split(
        self, prompt: list[int], max_tokens: int = 12, **more: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Send both legs at once and return both answers."""
        key = secrets.token_hex(16)
        return await asyncio.gather(
            self.complete(self.p, prompt, 1, self.params("prefill", key)),
            self.complete(self.d, prompt, max_tokens, self.params("decode", key), **more),
        )

    async def local(self, prompt: list[int], max_tokens: int = 12, *, on: Server | None = None) -> list[int]:
        """Return what decode generates from scratch: a salt of its own keeps it out of every prefix cache."""
        answer = await self.complete(on or self.d, prompt, max_tokens, cache_salt=secrets.token_hex(8))
        return tokens(answer)

    async def metric(self, server: Server, name: str, **labels: str) -> float:
        from prometheus_client.parser import text_string_to_metric_families

        async with aiohttp.ClientSession() as session, session.get(server.url + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        wanted = "\n".join(line for line in lines if line.startswith(name))  # a thousand others take long to parse
        return sum(
            sample.value
            for family in text_string_to_metric_families(wanted)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def becomes(self, wanted: float, server: Server, name: str, **labels: str) -> None:
        """Wait until a metric has that value: what a step did is counted a moment after its answer has left."""
        deadline_s = time.monotonic() + IDLE_S
        while (value := await self.metric(server, name, **labels)) != wanted:
            assert time.monotonic() < deadline_s, f"{name} is {value}, not {wanted}"
            await asyncio.sleep(0.05)

    async def parked(self, leg: asyncio.Task[Any]) -> None:
        """Wait until decode waits for KV."""
        while not await self.metric(self.d, "vllm:num_requests_waiting_by_reason", reason="deferred"):
            assert not leg.done(), f"it ended before anything could happen to it: {leg.result()}"
            await asyncio.sleep(0.01)  # the servers have to get on

    async def moving(self, leg: asyncio.Task[Any]) -> None:
        """Wait until KV is on its way: decode waits for it, and prefill computes or sends."""
        await self.parked(leg)
        while not await self.metric(self.p, "vllm:kv_cache_usage_perc"):
            assert not leg.done(), f"it ended before anything could happen to it: {leg.result()}"
            await asyncio.sleep(0.01)

    async def sends(self, outcome: str) -> float:
        """Return how many sends have ended on prefill with that outcome."""
        return await self.metric(self.p, "vllm:tollbridge_transfers_total", side="send", outcome=outcome)

    async def sends_become(self, wanted: float, outcome: str) -> None:
        await self.becomes(wanted, self.p, "vllm:tollbridge_transfers_total", side="send", outcome=outcome)

    async def release(self, transfer_id: str) -> None:
        """Tell prefill that nobody will fetch this transfer, as the router does."""
        await self.complete(self.p, [0], 1, self.params("release", transfer_id))

    async def idle(self, *servers: Server) -> bool:
        """Return whether every block of `servers` (both by default) became free in time."""
        deadline_s = time.monotonic() + IDLE_S
        while time.monotonic() < deadline_s:
            usage = [await self.metric(server, "vllm:kv_cache_usage_perc") for server in servers or (self.p, self.d)]
            if not any(usage):
                return True
            await asyncio.sleep(0.1)
        return False


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 512) for _ in range(length)]


def tokens(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def report(answer: dict[str, Any]) -> dict[str, Any]:
    return dict(answer["kv_transfer_params"]["tollbridge"])


def outcome(answer: dict[str, Any]) -> str:
    """Return how the transfer of a leg ended: its reason when it failed."""
    end = report(answer)["transfer"]
    return str(end.get("reason") or end["outcome"])
