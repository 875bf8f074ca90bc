"""Pairs of vLLM servers on one GPU, one pair per KV transport, all up at once so that runs can alternate."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import aiohttp

START_TIMEOUT_S = 420.0
SECRET = "benchmark-on-loopback-0123456789"


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


def kv_transfer_config(transport: str, kv_port: int) -> dict[str, object]:
    """Return `--kv-transfer-config` of a transport: tollbridge, nixl-cuda, nixl-cpu or nixl-push."""
    common: dict[str, object] = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    if transport == "tollbridge":
        return common | {
            "kv_connector": "TollbridgeConnector",
            "kv_connector_module_path": "tollbridge.vllm.connector",
            "kv_connector_extra_config": {"kv_host": "127.0.0.1", "kv_port": kv_port},
        }
    connector = "NixlPushConnector" if transport == "nixl-push" else "NixlConnector"
    return common | {"kv_connector": connector, "kv_buffer_device": "cpu" if transport == "nixl-cpu" else "cuda"}


def start(name: str, model: Path, transport: str, index: int, logs: Path, extra: list[str]) -> Server:
    """Start a server; `index` spaces the ports."""
    port, kv_port = 8100 + index, 7801 + 10 * index
    environ = {
        **os.environ,
        "TOLLBRIDGE_SECRET": SECRET,
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_DEEP_GEMM": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(5600 + 10 * index),
        "UCX_TLS": "tcp,self,cuda_copy",
    }
    argv = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model),
        "--served-model-name", "m", "--load-format", "dummy", "--attention-backend", "FLASH_ATTN",
        "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "8192",
        "--no-enable-prefix-caching", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log",
        "--kv-transfer-config", json.dumps(kv_transfer_config(transport, kv_port)), *extra,
    ]  # fmt: skip
    log = logs / f"{name}.log"
    log_file = log.open("wb")
    process = subprocess.Popen(argv, env=environ, stdout=log_file, stderr=log_file, start_new_session=True)
    return Server(name, port, kv_port, process, log, log_file)


async def wait_healthy(servers: list[Server]) -> None:
    """Return when all answer /health; RuntimeError with the end of the log of one that died or is late."""
    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(_healthy(session, server) for server in servers))


async def _healthy(session: aiohttp.ClientSession, server: Server) -> None:
    for _ in range(int(START_TIMEOUT_S)):
        if server.process.poll() is not None:
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
