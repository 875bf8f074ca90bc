"""What the servers of `pair` (tests/conftest.py) are started with, as tests of the connector count on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

BLOCK = 128  # vLLM's default on a CPU
CHUNK = 500  # prompt tokens per step; inside a block, so a step may end just before the last token, in its block

Models = Callable[[str], Path]
