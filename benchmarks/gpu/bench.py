"""`tollbridge bench length-sweep` and `interference` on one GPU: three vLLM servers, one alone and a pair that splits.

    python benchmarks/gpu/bench.py --shape qwen2.5-7b --out FOLDER        # about four minutes on an H200

Arms: `one` (a server without connector, twice for the A/A pair), `split` (prefill and decode servers on the same GPU,
KV by our connector over TCP loopback, our router). They share the GPU: an idle server costs memory only. Dummy weights,
random token ids, prefix caching off. FOLDER gets a folder per experiment: records, result, report. `--rehearse` runs
the same on this machine's CPU with a tiny model; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that the file runs from anywhere, uninstalled
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from benchmarks.gpu.router import start_router
from benchmarks.gpu.servers import CPU, GPU, Server, Spec, start, stop, wait_healthy
from benchmarks.gpu.shapes import SHAPES, make_model
from tollbridge.bench.experiments import interference, length_sweep
from tollbridge.bench.outcome import Experiment
from tollbridge.bench.records import Arm
from tollbridge.bench.run import measure
from tollbridge.bench.session import Options


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
                await _measure(options, _arms(one, prefill, decode, router.url), shape)
            finally:
                router.stop()
        finally:
            stop(servers)


def _arms(one: Server, prefill: Server, decode: Server, router: str) -> list[Arm]:
    alone = Arm(name="one", title="one vLLM server", url=one.url, model="m", workers=[one.url])
    again = Arm(name="one-again", title="one vLLM server, again (A/A)", url=one.url, model="m", workers=[one.url])
    split = Arm(
        name="split", title="split over two servers", url=router, policy="split", model="m",
        workers=[prefill.url, decode.url], num_workers=2,
    )  # fmt: skip
    return [alone, again, split]


async def _measure(options: argparse.Namespace, arms: list[Arm], shape: str) -> None:
    lengths = (128, 256) if options.rehearse else (512, 2048, 4096, 8192)
    sweep = length_sweep.Settings(lengths=lengths, repeats=3, blocks=options.blocks)
    long_tokens = 256 if options.rehearse else 4096
    steady = interference.Settings(streams=8, long_tokens=long_tokens, arrivals=8, blocks=options.blocks, budget_s=60.0)
    for experiment, settings in (
        (Experiment("length-sweep", length_sweep), sweep),
        (Experiment("interference", interference), steady),
    ):
        document, _ = await measure(
            experiment, arms, settings, options.out / experiment.name, seed=1, options=Options(stall_s=60.0),
            tell=lambda text: print(text, flush=True), about={"model": f"{shape}, dummy weights, all on one GPU"},
        )  # fmt: skip
        print(document.headline, flush=True)


def _spec(role: str, model: Path, options: argparse.Namespace) -> Spec:
    args = ["--max-model-len", "16384"]
    if not options.rehearse:
        args += ["--kv-cache-memory-bytes", str(int(options.kv_gb * 1e9)), "--gpu-memory-utilization", "0.3"]
    return Spec(name=role, model=model, transport=None if role == "one" else "tollbridge", args=args)


if __name__ == "__main__":
    sys.exit(main())
