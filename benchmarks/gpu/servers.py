"""vLLM servers for the benchmarks: on a GPU, or for a rehearsal on this machine's CPU."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import aiohttp

START_TIMEOUT_S = 420.0
_FIRST_EPHEMERAL = 32_768  # Linux' default of ip_local_port_range
_HANGS = b"Exception in thread nixl_handshake_listener"  # vLLM's NIXL scheduler then waits for that thread for good
SOURCES = Path(__file__).parents[2] / "src"
SECRET = "benchmark-on-loopback-0123456789"


@dataclass(frozen=True, kw_only=True)
class Host:
    """How vLLM is started on a kind of machine."""

    serve: Sequence[str]  # argv up to the model's folder
    args: Sequence[str]
    environ: Mapping[str, str]


GPU = Host(
    serve=(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"),
    args=("--attention-backend", "FLASH_ATTN"),
    environ={
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_DEEP_GEMM": "0",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "300",  # 5 s by default: the router would send on connections that just close
    },
)
CPU = Host(
    serve=(
        os.environ.get("TOLLBRIDGE_VLLM_PYTHON", sys.executable),
        *("-m", "vllm.entrypoints.openai.api_server", "--model"),
    ),
    args=("--dtype", "float32", "--enforce-eager"),
    environ={
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "300",
    },
)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A server to be started."""

    name: str
    model: Path
    transport: str | None = None  # tollbridge, nixl-cuda, nixl-cpu, nixl-push; None: no KV connector
    connector: Mapping[str, object] = field(default_factory=dict)  # more of tollbridge's kv_connector_extra_config
    args: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    gpus: str = ""  # CUDA_VISIBLE_DEVICES, the first is used; empty: as it is


@dataclass
class Server:
    """One vLLM process."""

    name: str
    port: int
    kv_port: int
    process: subprocess.Popen[bytes]
    log: Path
    log_file: IO[bytes] = field(repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def rss_bytes(self) -> int:
        """Return the resident memory of the server and its children."""
        import psutil

        root = psutil.Process(self.process.pid)
        return sum(process.memory_info().rss for process in [root, *root.children(recursive=True)])


@dataclass
class Pair:
    """A prefill and a decode server which share a transport."""

    transport: str
    prefill: Server
    decode: Server

    @property
    def is_ours(self) -> bool:
        return self.transport.startswith("tollbridge")


def kv_transfer_config(spec: Spec, kv_port: int) -> dict[str, object]:
    """Return `--kv-transfer-config` of a server."""
    common: dict[str, object] = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    if spec.transport == "tollbridge":
        return common | {
            "kv_connector": "TollbridgeConnector",
            "kv_connector_module_path": "tollbridge.vllm.connector",
            "kv_connector_extra_config": {"kv_host": "127.0.0.1", "kv_port": kv_port, **spec.connector},
        }
    connector = "NixlPushConnector" if spec.transport == "nixl-push" else "NixlConnector"
    return common | {"kv_connector": connector, "kv_buffer_device": "cpu" if spec.transport == "nixl-cpu" else "cuda"}


def start(spec: Spec, logs: Path, host: Host = GPU) -> Server:
    """Start a server; `wait_healthy` says when it is up."""
    port, kv_port = free_port(), free_port()
    argv = [
        *host.serve, str(spec.model),
        "--served-model-name", "m", "--load-format", "dummy", "--host", "127.0.0.1", "--port", str(port),
        "--no-enable-prefix-caching", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log",
        *host.args, *spec.args,
    ]  # fmt: skip
    if spec.transport is not None:
        argv += ["--kv-transfer-config", json.dumps(kv_transfer_config(spec, kv_port))]
    log = logs / f"{spec.name}.log"
    log_file = log.open("wb")
    process = subprocess.Popen(
        argv, env=_environ(spec, host, kv_port), stdout=log_file, stderr=log_file, start_new_session=True
    )
    return Server(spec.name, port, kv_port, process, log, log_file)


def _environ(spec: Spec, host: Host, kv_port: int) -> dict[str, str]:
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(SOURCES), os.environ.get("PYTHONPATH")))),  # for the connector
        "TOLLBRIDGE_SECRET": SECRET,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(kv_port),
        **host.environ,
        **spec.environ,
    }
    if spec.gpus:
        environ["CUDA_VISIBLE_DEVICES"] = spec.gpus
    return environ


def free_port() -> int:
    """Return a TCP port that nobody listens on, and that no process is given as any free one meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, _FIRST_EPHEMERAL)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


async def wait_healthy(servers: list[Server]) -> None:
    """Return when all answer /health; RuntimeError with the end of the log of one that died or is late."""
    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(_healthy(session, server) for server in servers))


async def _healthy(session: aiohttp.ClientSession, server: Server) -> None:
    for _ in range(int(START_TIMEOUT_S)):
        if server.process.poll() is not None or _HANGS in server.log.read_bytes():
            raise RuntimeError(f"{server.name} died: {server.log.read_text(errors='replace')[-3000:]}")
        try:
            async with session.get(server.url + "/health") as response:
                if response.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(1)
    raise RuntimeError(f"{server.name} is not up: {server.log.read_text(errors='replace')[-3000:]}")


def stop(servers: list[Server]) -> None:
    """End all servers and their children."""
    for server in servers:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)
    for server in servers:
        server.process.wait()
        server.log_file.close()
