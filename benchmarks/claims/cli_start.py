"""`tollbridge --help` answers at once: people ask for it often, and no router should import torch to start."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from benchmarks.support.result import ClaimResult

DESCRIPTION = "`tollbridge --help` takes less than 0.3 s and does not import torch"
HELP = "from tollbridge.cli.main import run; run(['--help'])"
COUNT_HEAVY = f"import sys; {HELP}; print(sum(name in sys.modules for name in ('torch', 'transformers', 'aiohttp')))"
MAX_S = 0.3


def run(quick: bool) -> ClaimResult:
    """Time `tollbridge --help` and a bare interpreter in turns, after one of each to warm the file cache."""
    rounds = 3 if quick else 21
    timings = [(_seconds(HELP), _seconds("pass")) for _ in range(rounds + 1)][1:]
    help_s, bare_s = (statistics.median(column) for column in zip(*timings, strict=True))
    counted = subprocess.run([sys.executable, "-c", COUNT_HEAVY], capture_output=True, text=True, check=True)
    num_heavy = int(counted.stdout.split()[-1])
    return ClaimResult(
        holds=help_s <= MAX_S and num_heavy == 0,
        figures={
            "help_median_s": help_s,
            "help_max_s": max(timing[0] for timing in timings),
            "bare_interpreter_median_s": bare_s,
            "num_heavy_modules": num_heavy,
        },
        bounds={"help_median_s": f"<= {MAX_S}", "num_heavy_modules": "== 0"},
        conditions={"rounds": rounds},
    )


def _seconds(script: str) -> float:
    begun_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", script], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begun_s
