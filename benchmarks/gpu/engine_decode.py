"""How fast does the embedded engine decode on a GPU, beside vLLM on the same shape?

    python benchmarks/gpu/engine_decode.py [--shapes qwen3-0.6b,qwen2.5-7b] [--out FILE.json]

Arms: the engine eager, the engine with CUDA graphs, vLLM with its defaults (graphs for the batches measured). Dummy
weights, bfloat16, random prompts of 512 tokens, greedy, no prefix shared. Decode tokens/s of a batch is what a run of
many tokens takes beyond a run of one: median over repetitions. Besides, what the graphs compute is compared with the
eager engine: greedy tokens of a small model in float32, which must be equal, and logits of the shape itself.

Every arm is a process of its own. All start at once and wait when they are warm; then they measure one after the other,
so nobody shares the GPU. An arm that fails, or is not ready in time, has its error in the JSON document, which is the
last line. `--rehearse` runs all but vLLM on this machine's CPU; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import queue
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that the file runs from anywhere, uninstalled
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from benchmarks.gpu.shapes import SHAPES, make_model

ARMS = ("eager", "graphs", "vllm")
BATCHES = (1, 8, 32)
PROMPT_TOKENS = 512
MAX_MODEL_LEN = 2048
KV_GB = 6
READY_S, MEASURE_S = 110.0, 45.0  # of all arms together, of one
ENVIRON = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
           "VLLM_USE_DEEP_GEMM": "0"}  # fmt: skip

Generate = Callable[[Sequence[list[int]], int], list[list[int]]]  # prompts, number of tokens -> generated ids


def main() -> int:
    """Run all arms and print the document."""
    options = _options()
    if options.arm:
        return _arm(options)
    shapes = ["rehearsal"] if options.rehearse else options.shapes.split(",")
    arms = [arm for arm in ARMS if not (options.rehearse and arm == "vllm")]
    with tempfile.TemporaryDirectory() as folder:
        results = _run_all([(shape, arm) for shape in shapes for arm in arms], Path(folder), options)
    document = {"arms": results, "share_of_vllm": _shares(results), "conditions": _conditions(options)}
    text = json.dumps(document)
    if options.out:
        Path(options.out).write_text(text)
    print(text)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Decode throughput of the embedded engine and of vLLM on one GPU.")
    parser.add_argument("--shapes", default="qwen3-0.6b,qwen2.5-7b")
    parser.add_argument("--tokens", type=int, default=64, help="generated in a measured run")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with a tiny model, without vLLM")
    parser.add_argument("--arm", help=argparse.SUPPRESS)  # inside: one arm
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _conditions(options: argparse.Namespace) -> dict[str, Any]:
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        gpus = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        gpus = []
    return {"gpus": gpus, "prompt_tokens": PROMPT_TOKENS, "tokens": options.tokens,
            "repetitions": options.repetitions, "rehearsal": options.rehearse}  # fmt: skip


def _shares(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return decode tokens/s as a share of vLLM's, by shape, arm and batch."""
    shares: dict[str, dict[str, float]] = {}
    for name, result in results.items():
        shape, arm = name.rsplit("/", 1)
        rates, others = result.get("tokens_per_s", {}), results.get(f"{shape}/vllm", {}).get("tokens_per_s", {})
        common = rates.keys() & others.keys() if arm != "vllm" else set()
        if common:
            shares[name] = {batch: round(rates[batch] / others[batch], 3) for batch in sorted(common, key=int)}
    return shares


# ── the parent: starts, lets measure, collects ──


def _run_all(arms: list[tuple[str, str]], folder: Path, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    for shape in {shape for shape, _ in arms}:
        make_model(shape, folder / "models")
    processes = {f"{shape}/{arm}": _start(shape, arm, folder, options) for shape, arm in arms}
    try:
        begun_s = time.monotonic()
        _wait(lambda: all(_said(folder, name, each) for name, each in processes.items()), READY_S)
        ready_s = time.monotonic() - begun_s
        ready = {name: process for name, process in processes.items() if (_place(folder, name) / "ready").exists()}
        for name in processes.keys() - ready.keys():
            _kill(processes[name])  # who still starts would disturb the others
        for name, process in ready.items():
            (_place(folder, name) / "go").touch()
            _wait(partial(_has_ended, folder, name, process), MEASURE_S)
            _kill(process)
        results = {name: _result(folder, name) for name in processes}
        return results | {"all/ready": {"seconds": round(ready_s, 1)}}
    finally:
        for process in processes.values():
            _kill(process)


def _start(shape: str, arm: str, folder: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    place = _place(folder, f"{shape}/{arm}")
    place.mkdir(parents=True)
    argv = [sys.executable, __file__, "--arm", arm, "--shape", shape, "--folder", str(folder)]
    argv += ["--tokens", str(options.tokens), "--repetitions", str(options.repetitions)]
    argv += ["--rehearse"] if options.rehearse else []
    with (place / "log").open("wb") as log:
        return subprocess.Popen(argv, stdout=log, stderr=log, env=os.environ | ENVIRON, start_new_session=True)


def _place(folder: Path, name: str) -> Path:
    return folder / "arms" / name


def _said(folder: Path, name: str, process: subprocess.Popen[bytes]) -> bool:
    return (_place(folder, name) / "ready").exists() or _has_ended(folder, name, process)


def _has_ended(folder: Path, name: str, process: subprocess.Popen[bytes]) -> bool:
    return _done(folder, name) or process.poll() is not None


def _done(folder: Path, name: str) -> bool:
    return (_place(folder, name) / "result.json").exists()


def _result(folder: Path, name: str) -> dict[str, Any]:
    if _done(folder, name):
        result: dict[str, Any] = json.loads((_place(folder, name) / "result.json").read_text())
        return result
    log = (_place(folder, name) / "log").read_text(errors="replace")
    return {"error": "not ready, or not done, in time", "log": log[-1500:]}


def _wait(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.1)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End an arm with all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# ── an arm ──


def _arm(options: argparse.Namespace) -> int:
    place = _place(options.folder, f"{options.shape}/{options.arm}")
    try:
        result = _measure(options, place)
    except BaseException as error:  # whatever it is, the document says it
        result = {"error": f"{type(error).__name__}: {error}"[:800], "trace": traceback.format_exc()[-1500:]}
    (place / "part.json").write_text(json.dumps(result))
    (place / "part.json").rename(place / "result.json")
    return 0


def _measure(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    model = options.folder / "models" / options.shape
    rng = random.Random(options.arm)
    result: dict[str, Any] = {}
    if options.arm == "vllm":
        generate = _vllm(model)
    else:
        generate, result = _ours(model, options)
    for batch in BATCHES:
        generate(_prompts(rng, batch, options), 4)  # compiles, captures, allocates
    (place / "ready").touch()
    _wait((place / "go").exists, READY_S + MEASURE_S * len(ARMS) * 2)
    result["tokens_per_s"] = {str(batch): _rate(generate, rng, batch, options) for batch in BATCHES}
    return result


def _rate(generate: Generate, rng: random.Random, batch: int, options: argparse.Namespace) -> float:
    """Return decode tokens/s: the tokens beyond the first over the time beyond that of the first."""
    times: dict[int, list[float]] = {1: [], 1 + options.tokens: []}
    for _ in range(options.repetitions):
        for num_tokens, taken in times.items():
            prompts = _prompts(rng, batch, options)
            begun_s = time.perf_counter()
            answers = generate(prompts, num_tokens)
            taken.append(time.perf_counter() - begun_s)
            assert all(len(answer) == num_tokens for answer in answers), "not every token came"
    one, many = (statistics.median(taken) for taken in times.values())
    return float(round(batch * options.tokens / (many - one), 1))


def _prompts(rng: random.Random, batch: int, options: argparse.Namespace) -> list[list[int]]:
    vocab_size = SHAPES[options.shape]["vocab_size"]
    return [[rng.randrange(10, vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]


def _vllm(model: Path) -> Generate:
    vllm = importlib.import_module("vllm")

    engine = vllm.LLM(
        model=str(model), load_format="dummy", dtype="bfloat16", max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=False, kv_cache_memory_bytes=KV_GB * 10**9, gpu_memory_utilization=0.2,
        attention_backend="FLASH_ATTN", max_num_seqs=64, compilation_config={"cudagraph_capture_sizes": list(BATCHES)},
    )  # fmt: skip

    def generate(prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(each.outputs[0].token_ids) for each in engine.generate(asked, params, use_tqdm=False)]

    return generate


def _ours(model: Path, options: argparse.Namespace) -> tuple[Generate, dict[str, Any]]:
    """Return the engine, and, with graphs, how what they compute differs from the eager engine."""
    import torch

    device = "cpu" if options.rehearse else "cuda"
    loaded = _dummy(model, SHAPES[options.shape], torch.float32 if options.rehearse else torch.bfloat16, device)
    num_bytes = (1 if options.rehearse else KV_GB) * 10**9
    engine, parts = _engine(loaded, model, num_bytes, graphs=options.arm == "graphs")
    if options.arm == "eager":
        return _generator(engine), {}
    return _generator(engine), {"equal_tokens": _same_tokens(options, device), "logits": _same_logits(loaded, parts)}


def _dummy(folder: Path, shape: dict[str, Any], dtype: Any, device: str) -> Any:
    """Return a LoadedModel of random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tollbridge.engine import attention
    from tollbridge.engine.model import LoadedModel

    attention.register()
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    make: Any = AutoModelForCausalLM
    with torch.device(device):
        module = make.from_config(config, dtype=dtype, attn_implementation=attention.IMPLEMENTATION)
    heads = shape["num_attention_heads"]
    return LoadedModel(
        name=folder.name, folder=folder, module=module.to(device).eval(), dtype=dtype, device=torch.device(device),
        num_layers=shape["num_hidden_layers"], num_heads=heads, num_kv_heads=shape["num_key_value_heads"],
        head_dim=shape.get("head_dim", shape["hidden_size"] // heads), vocab_size=shape["vocab_size"],
        max_positions=32768, eos_token_ids=(1,),
    )  # fmt: skip


def _engine(loaded: Any, folder: Path, num_bytes: int, *, graphs: bool) -> tuple[Any, tuple[Any, Any]]:
    """Return an engine over `loaded`, and its cache with the decoder (None: eager)."""
    from tollbridge.config.cluster import EngineConfig
    from tollbridge.engine.build import model_info
    from tollbridge.engine.cache import KVShape, PagedKVCache, num_blocks_for
    from tollbridge.engine.core import EmbeddedEngine
    from tollbridge.engine.fixed import FixedDecoder
    from tollbridge.engine.runner import ModelRunner
    from tollbridge.engine.sampler import TokenSampler
    from tollbridge.engine.tokenizer import ModelTokenizer

    shape = KVShape(num_layers=loaded.num_layers, block_size=16, num_kv_heads=loaded.num_kv_heads,
                    head_dim=loaded.head_dim, dtype=loaded.dtype)  # fmt: skip
    cache = PagedKVCache(shape, num_blocks=num_blocks_for(shape, num_bytes), device=loaded.device)
    config = EngineConfig(max_num_batched_tokens=8192, max_num_seqs=64, max_model_len=MAX_MODEL_LEN)
    decoder = FixedDecoder(loaded, cache, max_rows=64) if graphs else None
    runner = ModelRunner(loaded, cache, decoder=decoder)
    runner.warm_up()
    tokenizer = ModelTokenizer(folder, name=folder.name)
    engine = EmbeddedEngine(
        info=model_info(loaded, shape, config, num_blocks=cache.num_blocks), config=config, tokenizer=tokenizer,
        runner=runner, sampler=TokenSampler(), text_streams=tokenizer.text_stream,
    )  # fmt: skip
    return engine, (cache, decoder)


def _generator(engine: Any) -> Generate:
    from tollbridge.engine.base import EngineRequest, SamplingParams, StepOutput

    def generate(prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
        outputs: queue.SimpleQueue[StepOutput] = queue.SimpleQueue()
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            engine.submit(
                EngineRequest(
                    request_id=str(index), prompt_token_ids=tuple(prompt), sampling=sampling, sink=outputs.put
                )
            )
        answers: list[list[int]] = [[] for _ in prompts]
        num_open = len(prompts)
        while num_open:
            output = outputs.get(timeout=60)
            answers[int(output.request_id)] += output.token_ids
            num_open -= output.finish_reason is not None
        return answers

    return generate


def _same_tokens(options: argparse.Namespace, device: str) -> bool:
    """Return whether a small model in float32 says the same with graphs as without."""
    import torch

    folder, rng = options.folder / "models" / options.shape, random.Random(3)
    shape = SHAPES[options.shape] | {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 256,
                                     "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}  # fmt: skip
    small = make_model_of(shape, folder, options.folder / "small" / options.shape / options.arm)
    loaded = _dummy(small, shape, torch.float32, device)
    prompts = [[rng.randrange(10, shape["vocab_size"]) for _ in range(length)] for length in (1, 30, 200, 270, 17)]
    answers = []
    for graphs in (False, True):
        engine, _ = _engine(loaded, small, 200_000_000, graphs=graphs)
        answers.append(_generator(engine)(prompts, 40))
        engine.shutdown()
    return answers[0] == answers[1]


def make_model_of(shape: dict[str, Any], like: Path, folder: Path) -> Path:
    """Write a model folder like `like`, of another shape; return it."""
    folder.mkdir(parents=True)
    config = json.loads((like / "config.json").read_text()) | shape
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(like / name)
    return folder


def _same_logits(loaded: Any, parts: tuple[Any, Any]) -> dict[str, float]:
    """Return how far the logits of one step are from the eager ones, in their standard deviation."""
    from tollbridge.engine.runner import ModelRunner
    from tollbridge.sched.plan import SequenceChunk, StepPlan

    cache, decoder = parts
    rng, eager = random.Random(4), ModelRunner(loaded, cache)
    tables = [tuple(range(16 * row, 16 * row + 16)) for row in range(5)]
    prompts = [[rng.randrange(10, loaded.vocab_size) for _ in range(length)] for length in (1, 40, 100, 200, 255)]

    def plan(first: Sequence[int], tokens: Sequence[list[int]]) -> StepPlan:
        return StepPlan(chunks=[
            SequenceChunk(request_id=str(row), token_ids=tokens[row], first_token=first[row], block_table=table,
                          needs_logits=True)
            for row, table in enumerate(tables)
        ])  # fmt: skip

    eager.run(plan([0] * 5, prompts), lambda layer: None)
    step = plan([len(prompt) for prompt in prompts], [[7]] * 5)
    want = eager.run(step, lambda layer: None)
    got = ModelRunner(loaded, cache, decoder=decoder).run(step, lambda layer: None)
    error = (got - want).abs().max() / want.std()
    agree = (got.argmax(-1) == want.argmax(-1)).float().mean()
    cache.tensor.zero_()
    return {"max_error_std": round(float(error), 4), "argmax_equal": round(float(agree), 3)}


if __name__ == "__main__":
    sys.exit(main())
