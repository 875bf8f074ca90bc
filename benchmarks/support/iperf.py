"""`iperf3 -P n` between the hosts of a link: the best that several streams of plain C code do."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from typing import Any

from benchmarks.support.kv_pair import cores
from tollbridge.bench.netns import ADDRESSES, Link

MISSING = "iperf3 is not installed (apt-get install iperf3)"
_PORT = "5201"


def available() -> bool:
    return shutil.which("iperf3") is not None


def iperf(joined: Link, *, streams: int, num_bytes: int) -> float:
    """Send `num_bytes` from host a to host b, each end pinned to its core; return the received bytes per second."""
    core_a, core_b = cores()
    server_argv = ["taskset", "-c", str(core_b), "iperf3", "-s", "-1", "-p", _PORT, "-B", ADDRESSES["b"]]
    server_argv += ["--forceflush"]
    with subprocess.Popen(joined.command("b", server_argv), stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            for line in server.stdout:
                if "listening" in line.lower():
                    break
            client = ["taskset", "-c", str(core_a), "iperf3", "-c", ADDRESSES["b"], "-p", _PORT, "-J"]
            client += ["-P", str(streams), "-n", str(num_bytes), "-l", "1M"]
            done = subprocess.run(joined.command("a", client), capture_output=True, text=True, check=False, timeout=120)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(5.0)
        finally:
            server.terminate()
    report: dict[str, Any] = json.loads(done.stdout or "{}")
    if "error" in report or done.returncode:
        raise RuntimeError(f"iperf3 failed: {report.get('error', done.stderr)}")
    return float(report["end"]["sum_received"]["bits_per_second"]) / 8
