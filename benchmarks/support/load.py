"""Keep cores busy as a computing engine does: one float32 matrix product after the other, one process per core."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

_LOOP = """
import numpy
a = numpy.random.default_rng(0).standard_normal((384, 384), dtype=numpy.float32)
print("ready", flush=True)
while True:
    a @ a
"""
DESCRIPTION = "one process per core multiplying 384 x 384 float32 matrices (numpy, one thread), default priority"


@contextlib.contextmanager
def busy(cores: Sequence[int]) -> Iterator[None]:
    """Run the loop on each of `cores` until the block ends."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        for core in cores:
            argv = ["taskset", "-c", str(core), sys.executable, "-c", _LOOP]
            process = stack.enter_context(subprocess.Popen(argv, stdout=subprocess.PIPE, env=environ))
            stack.callback(process.kill)  # runs before Popen's own exit, which waits
            assert process.stdout is not None
            process.stdout.readline()
        yield
