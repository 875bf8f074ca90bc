"""Steps like those of an engine on a CPU core: products that release the interpreter lock, Python between them."""

from __future__ import annotations

import time

import numpy as np

NUM_LAYERS = 28
_PYTHON_OPERATIONS = 200  # per layer, with the interpreter lock: about 10 us


def timed_steps(window_s: float) -> list[float]:
    """Run steps for `window_s` and return how long each took."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((512, 512), dtype=np.float32)
    hidden = rng.standard_normal((64, 512), dtype=np.float32)
    times_s: list[float] = []
    end_s = time.perf_counter() + window_s
    while (begun_s := time.perf_counter()) < end_s:
        _step(hidden, weights)
        times_s.append(time.perf_counter() - begun_s)
    return times_s


def _step(hidden: np.ndarray, weights: np.ndarray) -> int:
    counted = 0
    for _ in range(NUM_LAYERS):
        hidden @ weights
        for number in range(_PYTHON_OPERATIONS):
            counted += number
    return counted
