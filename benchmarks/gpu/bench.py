"""`tollbridge bench length-sweep` and `interference` on one GPU: three vLLM servers, one alone and a pair that splits.

    python benchmarks/gpu/bench.py --shape qwen2.5-7b --out FOLDER        # about four minutes on an H200

Arms: `one` (a server without connector, twice for the A/A pair), `split` (prefill and decode servers on the same GPU,
KV by our connector over TCP loopback, our router). They share the GPU: an idle server costs memory only. Dummy weights,
random token ids, prefix caching off. First one request is split; the run ends there if the servers' counters say that
it was not. FOLDER gets a folder per experiment (records, result, report), and the servers' logs in one file when
something fails. A run that was cut off keeps its records: `tollbridge bench report FOLDER/length-sweep`. `--rehearse`
runs the same on this machine's CPU with a tiny model; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that the file runs from anywhere, uninstalled
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from benchmarks.gpu.router import start_router
from benchmarks.gpu.servers import CPU, GPU, Server, Spec, start, stop, wait_healthy
from benchmarks.gpu.shapes import SHAPES, make_model
from tollbridge.bench.experiments import interference, length_sweep, separation
from tollbridge.bench.outcome import Experiment
from tollbridge.bench.records import Arm
from tollbridge.bench.run import measure
from tollbridge.bench.session import Options
from tollbridge.report.document import Document

_LOG_CHARACTERS = 200_000  # kept of each server's


def main() -> int:
    parser = argparse.ArgumentParser(description="The bench's own experiments on one GPU.")
    parser.add_argument("--shape", default="qwen2.5-7b", choices=sorted(SHAPES))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--kv-gb", type=float, default=12.0, help="KV cache of a server")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with a tiny model")
    options = parser.parse_args()
    asyncio.run(_run(options))
    return 0


async def _run(options: argparse.Namespace) -> None:
    shape = "rehearsal" if options.rehearse else options.shape
    servers: list[Server] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            model = make_model(shape, folder)
            specs = [_spec(role, model, options) for role in ("one", "p", "d")]
            servers += [start(spec, folder, CPU if options.rehearse else GPU) for spec in specs]
            await wait_healthy(servers)
            one, prefill, decode = servers
            router = start_router(
                {"p": prefill, "d": decode}, folder, prefer={"p": "prefill", "d": "decode"}, connector="tollbridge"
            )
            try:
                run = _Run(options=options, shape=shape, names={prefill.url: "p", decode.url: "d", one.url: "one"})
                await run.all(_arms(one, prefill, decode, router.url), folder)
            finally:
                router.stop()
        except BaseException:
            _keep_logs(servers, options.out)
            raise
        finally:
            stop(servers)


def _keep_logs(servers: list[Server], out: Path) -> None:
    """Leave the end of each log in one file: few files come back from where this runs."""
    out.mkdir(parents=True, exist_ok=True)
    ends = [f"== {server.name}\n{server.log.read_text(errors='replace')[-_LOG_CHARACTERS:]}" for server in servers]
    (out / "servers.log").write_text("\n".join(ends))


def _arms(one: Server, prefill: Server, decode: Server, router: str) -> list[Arm]:
    alone = Arm(name="one", title="one vLLM server", url=one.url, model="m", workers=[one.url])
    again = Arm(name="one-again", title="one vLLM server, again (A/A)", url=one.url, model="m", workers=[one.url])
    split = Arm(
        name="split", title="split over two servers", url=router, policy="split", model="m",
        workers=[prefill.url, decode.url], num_workers=2,
    )  # fmt: skip
    return [alone, again, split]


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What is measured on servers that are up."""

    options: argparse.Namespace
    shape: str
    names: dict[str, str]  # of servers, by URL

    async def all(self, arms: list[Arm], folder: Path) -> None:
        """Make sure that requests are split, then run the experiments; RuntimeError when they are not."""
        once = separation.Settings(prompt_tokens=512, output_tokens=8)
        document, result = await self._measure("separation", separation, once, arms, folder)
        figures = result["cells"][separation.CELL]["figures"][arms[-1].name]
        moved = figures["kv_mb_per_split"]  # as decode itself reports
        if not moved and not document.headline.startswith("Split:"):
            raise RuntimeError(document.headline)
        small, blocks, out = self.options.rehearse, self.options.blocks, self.options.out
        lengths = (128, 256) if small else (512, 2048, 4096, 8192)
        sweep = length_sweep.Settings(lengths=lengths, repeats=3, blocks=blocks)
        await self._measure("length-sweep", length_sweep, sweep, arms, out)
        steady = interference.Settings(
            streams=8, long_tokens=256 if small else 4096, arrivals=8, blocks=blocks, budget_s=60.0
        )
        await self._measure("interference", interference, steady, arms, out)

    async def _measure(
        self, name: str, module: Any, settings: Any, arms: list[Arm], out: Path
    ) -> tuple[Document, dict[str, Any]]:
        options = Options(stall_s=60.0, is_local=True, names=self.names)
        document, result = await measure(
            Experiment(name, module), arms, settings, out / name, seed=1, options=options,
            tell=lambda text: print(text, flush=True),
            about={"model": f"{self.shape}, dummy weights, all on one device", **_device(), "vllm": _vllm_version()},
        )  # fmt: skip
        print(document.headline, flush=True)
        return document, result


def _device() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return {"gpu": subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()}
    except (OSError, subprocess.CalledProcessError):
        return {}


def _vllm_version() -> str:
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return "of another interpreter"


def _spec(role: str, model: Path, options: argparse.Namespace) -> Spec:
    args = ["--max-model-len", "16384"]
    if not options.rehearse:
        args += ["--kv-cache-memory-bytes", str(int(options.kv_gb * 1e9)), "--gpu-memory-utilization", "0.3"]
    return Spec(name=role, model=model, transport=None if role == "one" else "tollbridge", args=args)


if __name__ == "__main__":
    sys.exit(main())
